// A part of a quantised matrix, and the table of an instruction set's kernels for it.
#pragma once

#include "matmul_types.h"

namespace raggedmoe {

constexpr int QUANTIZED_ROWS = 6;  // multiplied at a time by what is decoded in registers
constexpr int MAX_DOT_COLS = 2;    // columns of which those rows' dot products are computed at a time

enum class Format : int64_t { INT8, E4M3, E5M2, MXFP4 };
enum class ScaleType { FLOAT32, BFLOAT16, EXPONENT };

// Scales of one group's matrix.
struct Scales {
  const void* data;
  ScaleType type;

  // So many neighbours, as float32.
  void read(int64_t first, int64_t num, float* out) const {
    if (type == ScaleType::FLOAT32) {
      std::memcpy(out, static_cast<const float*>(data) + first, num * sizeof(float));
      return;
    }
    const uint16_t* halves = static_cast<const uint16_t*>(data) + first;
    const uint8_t* exponents = static_cast<const uint8_t*>(data) + first;
    for (int64_t i = 0; i < num; ++i) {
      uint32_t bits;
      if (type == ScaleType::BFLOAT16)
        bits = uint32_t(halves[i]) << 16;
      else  // the first one is not normal
        bits = exponents[i] == 255 ? 0x7fc00000u : std::max(uint32_t(exponents[i]) << 23, 1u << 22);
      std::memcpy(out + i, &bits, sizeof bits);
    }
  }
};

// Some columns of a group's matrix [K N], or [N K] if it is transposed. A line is what lies in one piece: a row, or if it
// is transposed a column.
struct QuantizedPart {
  Format format;
  bool transposed;
  const uint8_t* values;
  int64_t num_k, width, first, last;  // width: N; first and last: of the columns
  int64_t block_k, block_n;           // what shares a scale
  int64_t scales_of_line;             // how many
  Scales scales;
  bool scaled;  // false: the rows were multiplied by the scales already

  int64_t num_blocks() const { return (num_k + block_k - 1) / block_k; }
  // Of a matrix that is transposed: the scales of some columns' blocks of k.
  void scales_of_blocks(int64_t n_block, float* out) const { read(n_block * scales_of_line, num_blocks(), out); }
  // The same for every k.
  void scales_of_rows(int64_t n_block, float* out) const {
    scales_of_blocks(n_block, out);
    spread(out, num_blocks(), block_k, 0, num_k);
  }
  // Of one that is not: the scales of all columns, for a block of k.
  void scales_of_columns(int64_t k_block, float* out) const {
    const int64_t n_block = first / block_n, num = (last - 1) / block_n - n_block + 1;
    read(k_block * scales_of_line + n_block, num, out);
    spread(out, num, block_n, first - n_block * block_n, last - first);
  }

 private:
  void read(int64_t at, int64_t num, float* out) const {
    if (scaled)
      scales.read(at, num, out);
    else
      std::fill_n(out, num, 1.0f);
  }
  // Repeats each number for its whole block, the first of which begins that many places before; in place, from the end.
  static void spread(float* out, int64_t num, int64_t block, int64_t before, int64_t length) {
    if (block == 1) return;
    for (int64_t i = num - 1; i >= 0; --i) {
      const float number = out[i];
      std::fill(out + std::max<int64_t>(0, i * block - before), out + std::min(length, (i + 1) * block - before), number);
    }
  }
};

// One instruction set's kernels for rows of float32.
struct QuantizedKernels {
  // Up to QUANTIZED_ROWS rows times a part. `sums` has room for the results, `scales` for those of all columns, or of
  // MAX_DOT_COLS columns' blocks.
  void (*multiply)(int64_t num_rows, const QuantizedPart&, const float* rows, float* out, int64_t out_row, float* sums,
                   float* scales);
  // The part's lines one after the other, times their scales.
  void (*decode)(const QuantizedPart&, float* out, float* scales);
};

// Kernels by dot products of pairs of bfloat16, which hold every value of every format, but not the values times scales.
namespace quantized_pairs {
bool run_here();
// Whether `multiply` takes parts whose scales lie so.
bool takes(const QuantizedPart&);
// Like that of float32, for rows of bfloat16 that are zero from k on up to a whole `STEP`.
constexpr int64_t STEP = 64;
void multiply(int64_t num_rows, const QuantizedPart&, const BFloat16* rows, int64_t row, float* out, int64_t out_row,
              float* sums, float* scales);
// The part's lines one after the other, without scales.
void decode(const QuantizedPart&, BFloat16* out);
// out = products * scales, or with `add` that much more.
void scale_columns(const float* products, const float* scales, int64_t num_cols, bool add, float* out);
}  // namespace quantized_pairs

}  // namespace raggedmoe
