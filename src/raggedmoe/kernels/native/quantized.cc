// `grouped_matmul` with a quantised right operand: cpu_native.py of that operation calls it through XLA's FFI.
//
// A matrix is read in parts that stay in cache. If its group has few rows, some of them are multiplied at a time by what is
// decoded in registers: in generating text each active expert's bytes are read once. For many rows a part is decoded into
// memory once, and multiplied there as a matrix of float32 is. An idle expert's bytes, its scales included, are never read.
#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "pages.h"
#include "parallel.h"
#include "quantized.h"
#include "xla_call.h"

#ifdef __x86_64__
#include <immintrin.h>
#endif

extern "C" const char* raggedmoe_isa();

namespace raggedmoe {
namespace {

constexpr int64_t PART_BYTES = 1 << 18;       // of a matrix, for a task with few rows
constexpr int64_t MAX_PART_COLS = 1024;       // whose sums stay in the first cache
constexpr int64_t MANY_ROWS = 20;             // from which on a part is decoded into memory
constexpr int64_t DECODED_NUMBERS = 1 << 20;  // in memory at a time
constexpr int64_t ROWS_OF_TASK = 1024;        // that share a decoded part
constexpr int64_t WIDE_BLOCK = 128;           // whose products are scaled after a matmul of bfloat16

#ifdef __x86_64__
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx512f,avx512vl,avx512bw,avx512dq,fma"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512vl,avx512bw,avx512dq,fma")
#endif
namespace quantized_avx512 {
#define RAGGEDMOE_LANES 16
#include "quantized.inc"
#undef RAGGEDMOE_LANES
}  // namespace quantized_avx512
#ifdef __clang__
#pragma clang attribute pop
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif
namespace quantized_avx2 {
#define RAGGEDMOE_LANES 8
#include "quantized.inc"
#undef RAGGEDMOE_LANES
}  // namespace quantized_avx2
#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
namespace quantized_baseline {
#define RAGGEDMOE_LANES 4
#include "quantized.inc"
#undef RAGGEDMOE_LANES
}  // namespace quantized_baseline

const QuantizedKernels& best_kernels() {
#ifdef __x86_64__
  const std::string isa = raggedmoe_isa();
  if (isa.rfind("avx512", 0) == 0) return quantized_avx512::KERNELS;
  if (isa == "avx2" && __builtin_cpu_supports("f16c")) return quantized_avx2::KERNELS;
#endif
  return quantized_baseline::KERNELS;
}

const QuantizedKernels& quantized_kernels() {
  static const QuantizedKernels& chosen = best_kernels();
  return chosen;
}

// Whether rows of this type are multiplied in pairs.
template <class T>
bool multiplies_pairs() {
  static const bool here = std::is_same_v<T, BFloat16> && raggedmoe_isa() == std::string("avx512_bf16") &&
                           quantized_pairs::run_here();
  return here;
}

ScaleType type_of(const ffi::AnyBuffer& scale) {
  if (scale.element_type() == ffi::F32) return ScaleType::FLOAT32;
  return scale.element_type() == ffi::BF16 ? ScaleType::BFLOAT16 : ScaleType::EXPONENT;
}

struct Task {
  int64_t group, first_row, last_row, first, last;  // rows of the group, columns of its matrix
};

struct QuantizedScratch {
  Scratch tile;
  Memory rows, out, sums, scales, decoded;
};
thread_local QuantizedScratch scratch;

// The operands of a call.
template <class T, class Out>
struct Operands {
  const T* lhs;
  Out* out;
  const ffi::AnyBuffer &values, &scale;
  Format format;
  bool transposed;
  int64_t num_k, width;

  int64_t bytes_of_matrix() const { return num_k * width / (format == Format::MXFP4 ? 2 : 1); }
  int64_t k_scales() const { return scale.dimensions()[transposed ? 2 : 1]; }
  int64_t n_scales() const { return scale.dimensions()[transposed ? 1 : 2]; }
  int64_t block_k() const { return num_k / k_scales(); }

  // The columns of a task, with its scales as they are.
  QuantizedPart part_of(const Task& task) const {
    const ScaleType type = type_of(scale);
    const int64_t bytes = type == ScaleType::FLOAT32 ? 4 : type == ScaleType::BFLOAT16 ? 2 : 1;
    const int64_t group = scale.dimensions()[0] == 1 ? 0 : task.group;
    const char* scales = static_cast<const char*>(scale.untyped_data()) + group * k_scales() * n_scales() * bytes;
    return {format, transposed, static_cast<const uint8_t*>(values.untyped_data()) + task.group * bytes_of_matrix(),
            num_k, width, task.first, task.last, num_k / k_scales(), width / n_scales(),
            transposed ? k_scales() : n_scales(), Scales{scales, type}, true};
  }
};

int64_t whole_steps(int64_t size) { return (size + quantized_pairs::STEP - 1) / quantized_pairs::STEP * quantized_pairs::STEP; }

// Rows by what is decoded in registers, a few at a time.
template <class T, class Out>
void multiply_few(const Operands<T, Out>& operands, const Task& task) {
  const int64_t num_k = operands.num_k, num_cols = task.last - task.first, k_scales = operands.k_scales();
  QuantizedPart part = operands.part_of(task);
  const bool in_pairs = multiplies_pairs<T>() && quantized_pairs::takes(part);
  // One scale for all columns is applied to the rows, if they are wide.
  const bool folded = !in_pairs && operands.n_scales() == 1;
  float* scales = scratch.scales.at_least(std::max(num_cols, MAX_DOT_COLS * k_scales));
  const float* row_scales = nullptr;
  if (folded) {
    float* numbers = scratch.decoded.at_least(k_scales);
    part.scales.read(0, k_scales, numbers);
    row_scales = numbers;
    part.scaled = false, part.block_k = num_k;
  }
  const int64_t row = in_pairs ? whole_steps(num_k) : num_k;
  float* rows = scratch.rows.at_least(QUANTIZED_ROWS * row);
  float* sums = scratch.sums.at_least(QUANTIZED_ROWS * whole_steps(num_cols));
  float* products = scratch.out.at_least(QUANTIZED_ROWS * num_cols);
  for (int64_t first = task.first_row; first < task.last_row; first += QUANTIZED_ROWS) {
    const int64_t some = std::min<int64_t>(QUANTIZED_ROWS, task.last_row - first);
    for (int64_t m = 0; m < some; ++m) {
      const T* from = operands.lhs + (first + m) * num_k;
      if (in_pairs) {
        T* to = reinterpret_cast<T*>(rows) + m * row;
        std::memcpy(static_cast<void*>(to), from, num_k * sizeof(T));
        std::memset(static_cast<void*>(to + num_k), 0, (row - num_k) * sizeof(T));
        continue;
      }
      float* to = rows + m * num_k;
      kernels<T>().widen(from, to, num_k);
      for (int64_t block = 0, k = 0; folded && block < k_scales; ++block)
        for (; k < (block + 1) * (num_k / k_scales); ++k) to[k] *= row_scales[block];
    }
    if (in_pairs)
      quantized_pairs::multiply(some, part, reinterpret_cast<const BFloat16*>(rows), row, products, num_cols, sums, scales);
    else
      quantized_kernels().multiply(some, part, rows, products, num_cols, sums, scales);
    for (int64_t m = 0; m < some; ++m)
      kernels<Out>().narrow(products + m * num_cols, operands.out + (first + m) * operands.width + task.first, num_cols);
  }
}

// Calls body(first, last) for tiles of a task's rows.
template <class Body>
void for_each_tile(const Task& task, Body body) {
  const int64_t num_rows = task.last_row - task.first_row, tiles = (num_rows + MAX_TILE_ROWS - 1) / MAX_TILE_ROWS;
  for (int64_t tile = 0; tile < tiles; ++tile)
    body(task.first_row + num_rows * tile / tiles, task.first_row + num_rows * (tile + 1) / tiles);
}

// Where a tile's float32 results are computed, and then written to the result.
template <class T, class Out, class Body>
void write_tile(const Operands<T, Out>& operands, const Task& task, int64_t first, int64_t last, Body body) {
  const int64_t num_cols = task.last - task.first;
  Out* to = operands.out + first * operands.width + task.first;
  if constexpr (std::is_same_v<Out, float>) {
    body(to, operands.width);
  } else {
    float* sums = scratch.out.at_least((last - first) * num_cols);
    body(sums, num_cols);
    for (int64_t m = 0; m < last - first; ++m)
      kernels<Out>().narrow(sums + m * num_cols, to + m * operands.width, num_cols);
  }
}

// Tiles of rows by what is decoded into memory.
template <class T, class Out>
void multiply_many(const Operands<T, Out>& operands, const Task& task) {
  const int64_t num_k = operands.num_k, num_cols = task.last - task.first;
  float* decoded = scratch.decoded.at_least(num_k * num_cols);
  quantized_kernels().decode(operands.part_of(task), decoded, scratch.scales.at_least(std::max(num_k, num_cols)));
  const View<float> matrix = operands.transposed ? View<float>{decoded, 1, num_k} : View<float>{decoded, num_cols, 1};
  for_each_tile(task, [&](int64_t first, int64_t last) {
    const T* from = operands.lhs + first * num_k;
    const float* rows;
    if constexpr (std::is_same_v<T, float>) {
      rows = from;
    } else {
      float* wide = scratch.rows.at_least((last - first) * num_k);
      kernels<T>().widen(from, wide, (last - first) * num_k);
      rows = wide;
    }
    const Product<float> product{View<float>{rows, num_k, 1}, matrix, num_k};
    write_tile(operands, task, first, last, [&](float* to, int64_t row) {
      kernels<float>().multiply(&product, 1, last - first, num_cols, to, row, scratch.tile);
    });
  });
}

// The same where the CPU multiplies pairs of bfloat16: the values are decoded, and each block's products scaled.
template <class Out>
void multiply_many_pairs(const Operands<BFloat16, Out>& operands, const Task& task) {
  const int64_t num_k = operands.num_k, num_cols = task.last - task.first;
  const QuantizedPart part = operands.part_of(task);
  BFloat16* decoded = reinterpret_cast<BFloat16*>(scratch.decoded.at_least((num_k * num_cols + 1) / 2));
  quantized_pairs::decode(part, decoded);
  float* scales = scratch.scales.at_least(part.num_blocks() * num_cols);  // of a line for each block
  for (int64_t block = 0; block < part.num_blocks(); ++block)
    if (!part.transposed) part.scales_of_columns(block, scales + block * num_cols);
  float* of_column = scratch.rows.at_least(part.num_blocks());
  for (int64_t n = 0; part.transposed && n < num_cols; ++n) {
    if (n == 0 || (task.first + n) % part.block_n == 0) part.scales_of_blocks((task.first + n) / part.block_n, of_column);
    for (int64_t block = 0; block < part.num_blocks(); ++block) scales[block * num_cols + n] = of_column[block];
  }
  for_each_tile(task, [&](int64_t first, int64_t last) {
    float* products = scratch.sums.at_least((last - first) * num_cols);
    write_tile(operands, task, first, last, [&](float* to, int64_t row) {
      for (int64_t k = 0, block = 0; k < num_k; k += part.block_k, ++block) {
        const View<BFloat16> matrix = operands.transposed ? View<BFloat16>{decoded + k, 1, num_k}
                                                          : View<BFloat16>{decoded + k * num_cols, num_cols, 1};
        const Product<BFloat16> product{View<BFloat16>{operands.lhs + first * num_k + k, num_k, 1}, matrix,
                                        std::min(part.block_k, num_k - k)};
        kernels<BFloat16>().multiply_wide(&product, 1, last - first, num_cols, products, num_cols, scratch.tile);
        for (int64_t m = 0; m < last - first; ++m)
          quantized_pairs::scale_columns(products + m * num_cols, scales + block * num_cols, num_cols, block > 0, to + m * row);
      }
    });
  });
}

template <class T, class Out>
void quantized(ffi::ThreadPool& pool, const ffi::AnyBuffer& lhs, const ffi::AnyBuffer& values,
               const ffi::AnyBuffer& scale, const int32_t* bounds, ffi::AnyBuffer& result, bool transpose_rhs,
               Format format) {
  const int64_t num_rows = lhs.dimensions()[0], num_k = lhs.dimensions()[1], width = result.dimensions()[1];
  const int64_t groups = values.dimensions()[0];
  Out* out = static_cast<Out*>(result.untyped_data());
  const Operands<T, Out> operands{static_cast<const T*>(lhs.untyped_data()), out, values, scale, format, transpose_rhs, num_k, width};
  prefer_large_pages(out, result.size_bytes());
  std::memset(static_cast<void*>(out), 0, bounds[0] * width * sizeof(Out));
  std::memset(static_cast<void*>(out + bounds[groups] * width), 0, (num_rows - bounds[groups]) * width * sizeof(Out));
  // Columns that are rows of the matrix are cut by bytes; others are wide, as each row of a part is read in one piece.
  // All these numbers are even, so that a part of mxfp4 begins at a whole byte.
  const int64_t by_bytes = std::max<int64_t>(64, PART_BYTES * width / std::max<int64_t>(1, operands.bytes_of_matrix()) / 64 * 64);
  const int64_t few_cols = transpose_rhs ? std::min(by_bytes, MAX_PART_COLS) : MAX_PART_COLS;
  const int64_t many_cols = std::min(TILE_COLS, std::max<int64_t>(48, DECODED_NUMBERS / num_k / 48 * 48));
  std::vector<Task> tasks;
  for (int64_t g = 0; g < groups; ++g) {
    const int64_t rows = bounds[g + 1] - bounds[g], parts = (rows + ROWS_OF_TASK - 1) / ROWS_OF_TASK;
    const int64_t cols = rows >= MANY_ROWS ? many_cols : few_cols;
    for (int64_t part = 0; part < parts; ++part)
      for (int64_t n = 0; n < width; n += cols)
        tasks.push_back({g, bounds[g] + rows * part / parts, bounds[g] + rows * (part + 1) / parts, n, std::min(n + cols, width)});
  }
  parallel_for(pool, tasks.size(), [&](int64_t i) {
    const Task& task = tasks[i];
    if (task.last_row - task.first_row < MANY_ROWS) return multiply_few(operands, task);
    if constexpr (std::is_same_v<T, BFloat16>)
      if (multiplies_pairs<T>() && operands.block_k() >= std::min(WIDE_BLOCK, num_k))
        return multiply_many_pairs(operands, task);
    multiply_many(operands, task);
  });
}

ffi::Error quantized_matmul(ffi::ThreadPool pool, ffi::AnyBuffer lhs, ffi::AnyBuffer values, ffi::AnyBuffer scale,
                            ffi::Buffer<ffi::S32> bounds, ffi::Result<ffi::AnyBuffer> out, bool transpose_rhs,
                            int64_t format) {
  const bool wide_in = lhs.element_type() == ffi::F32, wide_out = out->element_type() == ffi::F32;
  const auto call = wide_in    ? quantized<float, float>
                    : wide_out ? quantized<BFloat16, float>
                               : quantized<BFloat16, BFloat16>;
  return call_safely([&] {
    call(pool, lhs, values, scale, bounds.typed_data(), *out, transpose_rhs, static_cast<Format>(format));
  });
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(raggedmoe_quantized_matmul, quantized_matmul,
                              binding()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<bool>("transpose_rhs")
                                  .Attr<int64_t>("format"));

}  // namespace raggedmoe
