// What the tile kernels of every instruction set share, and the table through which operations call them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <type_traits>

#define RAGGEDMOE_INLINE inline __attribute__((always_inline))

namespace raggedmoe {

struct BFloat16 {
  uint16_t bits;
};

constexpr int64_t MAX_KC = 320;  // the depth of a panel, in numbers or pairs
constexpr int64_t MAX_TILE_ROWS = 256;  // of a tile: with that depth 320 KiB, in the second cache
constexpr int64_t TILE_COLS = 288;  // a multiple of every instruction set's panel
constexpr int64_t FEW_NUMBERS = 6144;  // of few rows, which stay in the first cache meanwhile
constexpr int64_t GRADIENT_COLS = 1024;  // of a tile of a matrix's gradient, whose left rows are packed once for all
constexpr int64_t STREAMED_RESULT = 1 << 17;  // numbers of a tile that does not stay in cache
constexpr int64_t FEW_ROWS = 6;  // up to which a matrix is streamed, not packed

// A matrix in memory: element (i, j) is at data[i * row + j * col].
template <class T>
struct View {
  const T* data;
  int64_t row, col;
};

// sum_k a[m, k] b[k, n] for k < num_k.
template <class T>
struct Product {
  View<T> a, b;
  int64_t num_k;
};

// Numbers whose place is kept from one use to the next, and whose values are not.
class Memory {
 public:
  float* at_least(int64_t size) {
    if (size > size_) {
      numbers_.reset(static_cast<float*>(std::aligned_alloc(64, (size * sizeof(float) + 63) / 64 * 64)));
      if (numbers_ == nullptr) throw std::bad_alloc();
      size_ = size;
    }
    return numbers_.get();
  }

 private:
  struct Free {
    void operator()(float* numbers) const { std::free(numbers); }
  };
  std::unique_ptr<float, Free> numbers_;
  int64_t size_ = 0;
};

// What a thread needs for a tile.
struct Scratch {
  Memory panels, rows, sums;
};

enum class Activation : int64_t { SILU, GELU, GELU_TANH, RELU2, CLAMPED_SWIGLU };

// Where a tile of each argument and result of an activation begins, and how far its rows are apart.
template <class T>
struct Line {
  T* data;
  int64_t row;
};

// A query's row of scores: the slots from `begin` to `end` of `length` count, if they are of the query's segment.
struct SoftmaxRow {
  int64_t begin, end, length;
  float scale;
  const int32_t* segments;  // of the slots; null: all are of one
  int32_t segment;
};

// One instruction set's kernels on a tile, for operands of type T.
template <class T>
struct Kernels {
  void (*multiply)(const Product<T>*, int num_products, int64_t rows, int64_t cols, T* out, int64_t out_row, Scratch&);
  void (*multiply_wide)(const Product<T>*, int num_products, int64_t rows, int64_t cols, float* out, int64_t out_row,
                        Scratch&);
  // The columns of a matrix lie in one piece here, and so do those of another one for the same rows, or there is none.
  void (*multiply_pair)(const Product<T>&, const T* other, int64_t rows, int64_t cols, float* out, float* other_out,
                        int64_t out_row, Scratch&);
  // hidden = activation(gate, up) of a row. up is null for ungated experts.
  void (*activate)(Activation, const float* gate, const float* up, T* hidden, int64_t length);
  // From the arguments of an activation and its result's cotangent: the result again, and both arguments' cotangents.
  void (*differentiate)(Activation, const float* gate, const float* up, const float* dhidden, T* hidden, T* dgate,
                        T* dup, int64_t length);
  // Writes exp(scale * score - peak), zero where a slot does not count, and returns the sum. Raises the peak before.
  float (*softmax)(const SoftmaxRow&, const float* scores, T* weights, float* peak);
  // From scores and the cotangents of weights: the weights, and the cotangents of scores before they were scaled.
  void (*softmax_slopes)(const SoftmaxRow&, const float* scores, const float* dweights, float logsumexp, float mean,
                         T* weights, T* slopes);
  void (*add)(const T* bias, float* sums, int64_t length);       // sums += bias
  void (*add_scaled)(float scale, const T* row, float* sums, int64_t length);  // sums += scale * row
  float (*dot)(const T* a, const T* b, int64_t length);
  void (*widen)(const T* from, float* to, int64_t length);
  void (*narrow)(const float* from, T* to, int64_t length);
};

// One instruction set's kernels, each set in a file and a namespace of its own.
struct Tables {
  Kernels<float> float32;
  Kernels<BFloat16> bfloat16;
};
namespace avx512_bf16 {
extern const Kernels<BFloat16> TABLE;  // of float32 it has no others than AVX-512
}
namespace avx512 {
extern const Tables TABLES;
}
namespace avx2 {
extern const Tables TABLES;
}
namespace baseline {
extern const Tables TABLES;
}

// Those of the best instruction set that this processor has, or that RAGGEDMOE_CPU_ISA names.
template <class T>
const Kernels<T>& kernels();

}  // namespace raggedmoe
