// `grouped_matmul` with a quantised right operand: cpu_native.py of that operation calls it through XLA's FFI.
//
// A matrix is read in parts that stay in cache, and each part is multiplied by a few of its group's rows at a time. So in
// decoding each active expert's bytes are read once, and those of an idle one, its scales included, never.
#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "matmul_types.h"
#include "parallel.h"
#include "xla_call.h"

#ifdef __x86_64__
#include <immintrin.h>
#endif

extern "C" const char* raggedmoe_isa();

namespace raggedmoe {
namespace {

constexpr int QUANTIZED_ROWS = 6;            // multiplied at a time
constexpr int64_t PART_BYTES = 1 << 18;      // of a matrix, for a task
constexpr int64_t MAX_PART_COLS = 1024;      // whose sums stay in the first cache

enum class Format : int64_t { INT8, E4M3, E5M2, MXFP4 };

// Scales of one group's matrix: float32, bfloat16, or shared exponents.
struct Scales {
  const void* data;
  ffi::DataType type;

  float at(int64_t i) const {
    if (type == ffi::F32) return static_cast<const float*>(data)[i];
    uint32_t bits;
    if (type == ffi::BF16) {
      bits = uint32_t(static_cast<const uint16_t*>(data)[i]) << 16;
    } else {
      const uint32_t exponent = static_cast<const uint8_t*>(data)[i];
      bits = exponent == 255 ? 0x7fc00000u : std::max(exponent << 23, 1u << 22);  // the first one is not normal
    }
    float scale;
    std::memcpy(&scale, &bits, sizeof scale);
    return scale;
  }
};

// Some columns of a group's matrix [K N], or [N K] if it is transposed, and how its scales lie: those of block (k, n) at
// k * scale_k + n * scale_n.
struct QuantizedPart {
  Format format;
  bool transposed;
  const uint8_t* values;
  int64_t num_k, width, first, last;  // width: N; first and last: of the columns
  int64_t block_k, block_n, scale_k, scale_n;
  Scales scales;
  bool scaled;  // false: the rows were multiplied by the scales already

  // The scales of all columns, for a block of the rows.
  void scales_of_columns(int64_t k_block, float* out) const {
    for (int64_t n = first, n_block = first / block_n; n < last; ++n_block) {
      const float one = scale(k_block, n_block);
      const int64_t end = std::min((n_block + 1) * block_n, last);
      for (; n < end; ++n) out[n - first] = one;
    }
  }
  float scale(int64_t k_block, int64_t n_block) const {
    return scaled ? scales.at(k_block * scale_k + n_block * scale_n) : 1.0f;
  }
};

using Multiply = void (*)(int64_t, const QuantizedPart&, const float*, float*, int64_t, float*, float*);

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

Multiply multiply_here() {
#ifdef __x86_64__
  const std::string isa = raggedmoe_isa();
  if (isa.rfind("avx512", 0) == 0) return quantized_avx512::multiply;
  if (isa == "avx2" && __builtin_cpu_supports("f16c")) return quantized_avx2::multiply;
#endif
  return quantized_baseline::multiply;
}

struct Task {
  int64_t group, first, last;
};

struct QuantizedScratch {
  Memory rows, out, sums, scales;
};
thread_local QuantizedScratch scratch;

template <class T, class Out>
void quantized(ffi::ThreadPool& pool, const ffi::AnyBuffer& lhs, const ffi::AnyBuffer& values,
               const ffi::AnyBuffer& scale, const int32_t* bounds, ffi::AnyBuffer& result, bool transpose_rhs,
               Format format) {
  static const Multiply multiply = multiply_here();
  const int64_t num_rows = lhs.dimensions()[0], num_k = lhs.dimensions()[1], width = result.dimensions()[1];
  const int64_t groups = values.dimensions()[0], k_dim = transpose_rhs ? 2 : 1, n_dim = 3 - k_dim;
  const int64_t k_scales = scale.dimensions()[k_dim], n_scales = scale.dimensions()[n_dim];
  const int64_t bytes = num_k * width / (format == Format::MXFP4 ? 2 : 1);
  const int64_t scale_bytes = scale.element_type() == ffi::F32 ? 4 : scale.element_type() == ffi::BF16 ? 2 : 1;
  const T* a = static_cast<const T*>(lhs.untyped_data());
  Out* out = static_cast<Out*>(result.untyped_data());
  std::memset(static_cast<void*>(out), 0, bounds[0] * width * sizeof(Out));
  std::memset(static_cast<void*>(out + bounds[groups] * width), 0, (num_rows - bounds[groups]) * width * sizeof(Out));
  // Columns that are rows of the matrix are cut by bytes; others are wide, as each row of a part is read in one piece.
  // Both numbers are even, so that a part of mxfp4 begins at a whole byte.
  const int64_t by_bytes = std::max<int64_t>(64, PART_BYTES * width / std::max<int64_t>(1, bytes) / 64 * 64);
  const int64_t cols = transpose_rhs ? std::min(by_bytes, MAX_PART_COLS) : MAX_PART_COLS;
  std::vector<Task> tasks;
  for (int64_t g = 0; g < groups; ++g)
    for (int64_t n = 0; bounds[g] < bounds[g + 1] && n < width; n += cols)
      tasks.push_back({g, n, std::min(n + cols, width)});
  parallel_for(pool, tasks.size(), [&](int64_t i) {
    const Task& task = tasks[i];
    const int64_t group_of_scale = scale.dimensions()[0] == 1 ? 0 : task.group;
    const char* scales = static_cast<const char*>(scale.untyped_data()) + group_of_scale * k_scales * n_scales * scale_bytes;
    // One scale for all columns is applied to the rows.
    const bool folded = n_scales == 1;
    const QuantizedPart part{format, transpose_rhs, static_cast<const uint8_t*>(values.untyped_data()) + task.group * bytes,
                             num_k, width, task.first, task.last, folded ? num_k : num_k / k_scales, width / n_scales,
                             transpose_rhs ? 1 : n_scales, transpose_rhs ? k_scales : 1,
                             Scales{scales, scale.element_type()}, !folded};
    const int64_t num_cols = task.last - task.first;
    float* rows = scratch.rows.at_least(QUANTIZED_ROWS * num_k);
    float* sums = scratch.sums.at_least(QUANTIZED_ROWS * num_cols);
    float* column_scales = scratch.scales.at_least(num_cols);
    float* products = scratch.out.at_least(QUANTIZED_ROWS * num_cols);
    for (int64_t first = bounds[task.group]; first < bounds[task.group + 1]; first += QUANTIZED_ROWS) {
      const int64_t some = std::min<int64_t>(QUANTIZED_ROWS, bounds[task.group + 1] - first);
      for (int64_t m = 0; m < some; ++m) {
        kernels<T>().widen(a + (first + m) * num_k, rows + m * num_k, num_k);
        for (int64_t block = 0, k = 0; folded && block < k_scales; ++block) {
          const float one = part.scales.at(block);
          for (; k < (block + 1) * (num_k / k_scales); ++k) rows[m * num_k + k] *= one;
        }
      }
      multiply(some, part, rows, products, num_cols, sums, column_scales);
      for (int64_t m = 0; m < some; ++m)
        kernels<Out>().narrow(products + m * num_cols, out + (first + m) * width + task.first, num_cols);
    }
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
