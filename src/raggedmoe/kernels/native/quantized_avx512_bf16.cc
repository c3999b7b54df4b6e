// Products of few rows of bfloat16 with quantised matrices, whose values become bfloat16 by tables in registers, by AVX-512's
// dot products of pairs. Scales are applied to the float32 sums.
#include "quantized.h"

#ifdef __x86_64__
#include <immintrin.h>

#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx512f,avx512vl,avx512bw,avx512dq,avx512vbmi,avx512bf16,avx2,fma"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512vl,avx512bw,avx512dq,avx512vbmi,avx512bf16,avx2,fma")
#endif

namespace raggedmoe::quantized_pairs {
namespace {

constexpr int64_t LANES = 16;
constexpr int64_t AHEAD = 2048;  // how many bytes before they are read they are asked for
constexpr int64_t NARROW = 32;   // a block of which two are a step
typedef float Vec __attribute__((vector_size(64), aligned(4), may_alias));

// The bits of a bfloat16 of (1.mantissa or 0.mantissa) times a power of two, for a code without its sign.
constexpr int bits_of_float(int code, int mantissa_bits, int bias) {
  const int mantissa = code % (1 << mantissa_bits), exponent = code >> mantissa_bits;
  if (exponent > 0) return (exponent - bias + 127) << 7 | mantissa << (7 - mantissa_bits);
  if (mantissa == 0) return 0;
  int top = 0;
  while (mantissa >> (top + 1)) ++top;
  return (top + 1 - bias - mantissa_bits + 127) << 7 | (mantissa << (7 - top) & 0x7f);
}
constexpr int bits_of(Format format, int code) {
  switch (format) {
    case Format::INT8: return bits_of_float(code, 7, 1 - 7);  // of its magnitude, a whole number
    case Format::E4M3: return code == 0x7f ? 0x7fc0 : bits_of_float(code, 3, 7);
    case Format::E5M2: return code > 0x7c ? 0x7fc0 : code == 0x7c ? 0x7f80 : bits_of_float(code, 2, 15);
    default: return bits_of_float(code % 8, 1, 1) | (code & 8) << 12;
  }
}
struct Bytes {
  alignas(64) uint8_t low[128], high[128];
};
constexpr Bytes bytes_of(Format format) {
  Bytes bytes{};
  for (int code = 0; code < 128; ++code) {
    bytes.low[code] = bits_of(format, code) & 0xff;
    bytes.high[code] = bits_of(format, code) >> 8;
  }
  return bytes;
}

// Values as bfloat16, of each the lower or the upper byte.
struct Halves {
  __m512i low, high;
};
template <Format FORMAT>
RAGGEDMOE_INLINE Halves look_up(__m512i code) {
  static constexpr Bytes BYTES = bytes_of(FORMAT);
  const __m512i *low = reinterpret_cast<const __m512i*>(BYTES.low), *high = reinterpret_cast<const __m512i*>(BYTES.high);
  if constexpr (FORMAT == Format::MXFP4) {
    return {_mm512_maskz_permutexvar_epi8(~0ull, code, low[0]), _mm512_maskz_permutexvar_epi8(~0ull, code, high[0])};
  } else if constexpr (FORMAT == Format::INT8) {
    const __m512i size = _mm512_abs_epi8(code);  // of the smallest number it is 128, which has no place in the tables
    const __m512i sign = code & _mm512_set1_epi8(-128);
    const __m512i upper = _mm512_permutex2var_epi8(high[0], size, high[1]) | sign;
    return {_mm512_permutex2var_epi8(low[0], size, low[1]),
            _mm512_mask_blend_epi8(_mm512_movepi8_mask(size), upper, _mm512_set1_epi8(-0x3d))};
  } else {
    const __m512i sign = code & _mm512_set1_epi8(-128);
    return {_mm512_permutex2var_epi8(low[0], code, low[1]), _mm512_permutex2var_epi8(high[0], code, high[1]) | sign};
  }
}

// STEP codes from a place on, zero from `count` on, a byte each.
template <Format FORMAT>
RAGGEDMOE_INLINE __m512i codes(const uint8_t* values, int64_t at, int64_t count) {
  const __mmask64 some = count >= STEP ? ~0ull : (1ull << count) - 1;
  if constexpr (FORMAT != Format::MXFP4) return _mm512_maskz_loadu_epi8(some, values + at);
  const __mmask32 pairs = count >= STEP ? ~0u : (1u << count / 2) - 1;
  const __m512i pair = _mm512_cvtepu8_epi16(_mm256_maskz_loadu_epi8(pairs, values + at / 2));
  return (pair | _mm512_slli_epi16(pair, 4)) & _mm512_set1_epi8(15);
}
template <Format FORMAT>
RAGGEDMOE_INLINE void ask_for(const uint8_t* values, int64_t at) {
  __builtin_prefetch(values + (FORMAT == Format::MXFP4 ? at / 2 : at) + AHEAD);
}

// STEP neighbours as bfloat16.
struct Decoded {
  __m512i vectors[2];
};
template <Format FORMAT>
RAGGEDMOE_INLINE Decoded decode_step(const uint8_t* values, int64_t at, int64_t count) {
  // In the order in which interleaving bytes makes neighbours of them.
  const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
  const Halves half = look_up<FORMAT>(_mm512_maskz_permutexvar_epi64(0xff, order, codes<FORMAT>(values, at, count)));
  return {{_mm512_unpacklo_epi8(half.low, half.high), _mm512_unpackhi_epi8(half.low, half.high)}};
}

RAGGEDMOE_INLINE Vec dot(Vec sums, __m512i a, __m512i b) {
  return (Vec)_mm512_dpbf16_ps((__m512)sums, (__m512bh)a, (__m512bh)b);
}
// The halves of a step have sums of their own where there are few others, so that none waits for the one before.
template <int COLS>
constexpr int PARTS = COLS == 1 ? 2 : 1;
template <int ROWS, int COLS>
RAGGEDMOE_INLINE void add_dots(const BFloat16* rows, int64_t row, const Decoded& w, int j,
                               Vec (&sums)[ROWS][COLS][PARTS<COLS>]) {
#pragma GCC unroll 8
  for (int half = 0; half < 2; ++half)
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; ++i) {
      Vec& sum = sums[i][j][half % PARTS<COLS>];
      sum = dot(sum, _mm512_loadu_si512(rows + i * row + half * 2 * LANES), w.vectors[half]);
    }
}

typedef float Vec4 __attribute__((vector_size(16), may_alias));
RAGGEDMOE_INLINE float sum_of(Vec v) {
  Vec4 parts[4];
  std::memcpy(parts, &v, sizeof parts);
  const Vec4 sum = (parts[0] + parts[1]) + (parts[2] + parts[3]);
  return (sum[0] + sum[2]) + (sum[1] + sum[3]);
}

// Rows of the matrix are columns of the result: dot products of COLS of them with ROWS rows.
template <Format FORMAT, int ROWS, int COLS>
RAGGEDMOE_INLINE void dot_columns(const QuantizedPart& part, const BFloat16* rows, int64_t row, int64_t n, float* out,
                                  int64_t out_row, float* scales) {
  const int64_t num_k = part.num_k, num_blocks = part.num_blocks(), block_k = part.block_k;
  Vec totals[ROWS][COLS] = {};
#pragma GCC unroll 8
  for (int j = 0; j < COLS; ++j) part.scales_of_blocks((n + j) / part.block_n, scales + j * num_blocks);
  if (block_k == NARROW) {
    for (int64_t k = 0; k < num_k; k += STEP)
#pragma GCC unroll 8
      for (int j = 0; j < COLS; ++j) {
        const int64_t at = (n + j) * num_k + k, block = j * num_blocks + k / NARROW;
        ask_for<FORMAT>(part.values, at);
        const Decoded w = decode_step<FORMAT>(part.values, at, num_k - k);
        const float second = scales[k + NARROW < num_k ? block + 1 : block];
#pragma GCC unroll 8
        for (int i = 0; i < ROWS; ++i) {
          const BFloat16* x = rows + i * row + k;
          totals[i][j] += dot(Vec{}, _mm512_loadu_si512(x), w.vectors[0]) * scales[block];
          totals[i][j] += dot(Vec{}, _mm512_loadu_si512(x + NARROW), w.vectors[1]) * second;
        }
      }
  } else {
    for (int64_t first = 0, block = 0; first < num_k; first += block_k, ++block) {
      const int64_t last = std::min(first + block_k, num_k);
      Vec sums[ROWS][COLS][PARTS<COLS>] = {};
      int64_t k = first;
      for (; k + STEP <= last; k += STEP)
#pragma GCC unroll 8
        for (int j = 0; j < COLS; ++j) {
          const int64_t at = (n + j) * num_k + k;
          ask_for<FORMAT>(part.values, at);
          add_dots(rows + k, row, decode_step<FORMAT>(part.values, at, STEP), j, sums);
        }
#pragma GCC unroll 8
      for (int j = 0; k < last && j < COLS; ++j)
        add_dots(rows + k, row, decode_step<FORMAT>(part.values, (n + j) * num_k + k, last - k), j, sums);
#pragma GCC unroll 8
      for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 8
        for (int j = 0; j < COLS; ++j) {
          Vec sum = sums[i][j][0];
          if constexpr (PARTS<COLS> == 2) sum += sums[i][j][1];
          totals[i][j] += sum * scales[j * num_blocks + block];
        }
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 8
    for (int j = 0; j < COLS; ++j)
      out[i * out_row + n - part.first + j] = sum_of(totals[i][j]);
}

// For STEP columns and two rows of the matrix, pairs of both: in each vector those of LANES neighbouring columns.
struct Pairs {
  __m512i vectors[4];
};
template <Format FORMAT>
RAGGEDMOE_INLINE Pairs decode_pairs(__m512i first, __m512i second) {
  // In the order in which interleaving bytes twice makes neighbours of them.
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  first = _mm512_maskz_permutexvar_epi32(0xffff, order, first);
  second = _mm512_maskz_permutexvar_epi32(0xffff, order, second);
  const Halves a = look_up<FORMAT>(_mm512_unpacklo_epi8(first, second));
  const Halves b = look_up<FORMAT>(_mm512_unpackhi_epi8(first, second));
  return {{_mm512_unpacklo_epi8(a.low, a.high), _mm512_unpackhi_epi8(a.low, a.high), _mm512_unpacklo_epi8(b.low, b.high),
           _mm512_unpackhi_epi8(b.low, b.high)}};
}

// Rows of the matrix are summed, LINES at a time. `sums` has room for all of a block's, and `scales` for its columns'.
template <Format FORMAT, int ROWS>
RAGGEDMOE_INLINE void add_rows(const QuantizedPart& part, const BFloat16* rows, int64_t row, float* out, int64_t out_row,
                               float* sums, float* scales) {
  constexpr int64_t LINES = 8;
  const int64_t num_cols = part.last - part.first, width = (num_cols + STEP - 1) / STEP * STEP;
  for (int64_t first = 0, block = 0; first < part.num_k; first += part.block_k, ++block) {
    const int64_t last = std::min(first + part.block_k, part.num_k);
    std::memset(sums, 0, ROWS * width * sizeof(float));
    for (int64_t k = first; k < last; k += LINES)
      for (int64_t n = 0; n < num_cols; n += STEP) {
        Vec tile[ROWS][4];
#pragma GCC unroll 8
        for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 8
          for (int v = 0; v < 4; ++v) tile[i][v] = *reinterpret_cast<Vec*>(sums + i * width + n + v * LANES);
        for (int64_t line = k; line < std::min(k + LINES, last); line += 2) {
          const int64_t at = line * part.width + part.first + n, count = num_cols - n;
          for (int64_t next = LINES; next < LINES + 2; ++next)
            __builtin_prefetch(part.values + (at + next * part.width) / (FORMAT == Format::MXFP4 ? 2 : 1));
          const __m512i second = line + 1 < last ? codes<FORMAT>(part.values, at + part.width, count) : __m512i{};
          const Pairs w = decode_pairs<FORMAT>(codes<FORMAT>(part.values, at, count), second);
#pragma GCC unroll 8
          for (int i = 0; i < ROWS; ++i) {
            int32_t pair;
            std::memcpy(&pair, rows + i * row + line, sizeof pair);
#pragma GCC unroll 8
            for (int v = 0; v < 4; ++v) tile[i][v] = dot(tile[i][v], _mm512_set1_epi32(pair), w.vectors[v]);
          }
        }
#pragma GCC unroll 8
        for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 8
          for (int v = 0; v < 4; ++v) *reinterpret_cast<Vec*>(sums + i * width + n + v * LANES) = tile[i][v];
      }
    part.scales_of_columns(block, scales);
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; ++i) scale_columns(sums + i * width, scales, num_cols, block > 0, out + i * out_row);
  }
}

template <Format FORMAT, int ROWS>
void multiply_rows(int64_t num_rows, const QuantizedPart& part, const BFloat16* rows, int64_t row, float* out,
                   int64_t out_row, float* sums, float* scales) {
  if constexpr (ROWS > 1)
    if (num_rows < ROWS) return multiply_rows<FORMAT, ROWS - 1>(num_rows, part, rows, row, out, out_row, sums, scales);
  if (!part.transposed) return add_rows<FORMAT, ROWS>(part, rows, row, out, out_row, sums, scales);
  constexpr int COLS = ROWS <= 3 ? 1 : 2;  // one alone is read fastest
  int64_t n = part.first;
  for (; n + COLS <= part.last; n += COLS) dot_columns<FORMAT, ROWS, COLS>(part, rows, row, n, out, out_row, scales);
  for (; n < part.last; ++n) dot_columns<FORMAT, ROWS, 1>(part, rows, row, n, out, out_row, scales);
}

template <Format FORMAT>
void decode_lines(const QuantizedPart& part, BFloat16* out) {
  const int64_t cols = part.last - part.first;
  const int64_t num_lines = part.transposed ? cols : part.num_k, length = part.transposed ? part.num_k : cols;
  for (int64_t line = 0; line < num_lines; ++line, out += length) {
    const int64_t at = part.transposed ? (part.first + line) * part.num_k : line * part.width + part.first;
    for (int64_t i = 0; i < length; i += STEP) {
      const Decoded w = decode_step<FORMAT>(part.values, at + i, length - i);
      for (int64_t half = 0; half < 2; ++half) {
        const int64_t count = std::min<int64_t>(32, length - i - half * 32);
        if (count > 0) _mm512_mask_storeu_epi16(out + i + half * 32, ~0u >> (32 - count), w.vectors[half]);
      }
    }
  }
}

}  // namespace

bool run_here() { return __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512bf16"); }

bool takes(const QuantizedPart& part) {
  if (part.block_k >= part.num_k) return true;
  return part.transposed ? part.block_k % STEP == 0 || part.block_k == NARROW : part.block_k % 2 == 0;
}

void multiply(int64_t num_rows, const QuantizedPart& part, const BFloat16* rows, int64_t row, float* out,
              int64_t out_row, float* sums, float* scales) {
  const auto call = part.format == Format::INT8    ? multiply_rows<Format::INT8, QUANTIZED_ROWS>
                    : part.format == Format::E4M3  ? multiply_rows<Format::E4M3, QUANTIZED_ROWS>
                    : part.format == Format::E5M2  ? multiply_rows<Format::E5M2, QUANTIZED_ROWS>
                                                   : multiply_rows<Format::MXFP4, QUANTIZED_ROWS>;
  call(num_rows, part, rows, row, out, out_row, sums, scales);
}

void decode(const QuantizedPart& part, BFloat16* out) {
  const auto call = part.format == Format::INT8    ? decode_lines<Format::INT8>
                    : part.format == Format::E4M3  ? decode_lines<Format::E4M3>
                    : part.format == Format::E5M2  ? decode_lines<Format::E5M2>
                                                   : decode_lines<Format::MXFP4>;
  call(part, out);
}

void scale_columns(const float* products, const float* scales, int64_t num_cols, bool add, float* out) {
  for (int64_t n = 0; n < num_cols; n += LANES) {
    const __mmask16 some = num_cols - n >= LANES ? 0xffff : (1 << (num_cols - n)) - 1;
    const __m512 before = _mm512_maskz_loadu_ps(add ? some : 0, out + n);
    const __m512 scale = _mm512_maskz_loadu_ps(some, scales + n), product = _mm512_maskz_loadu_ps(some, products + n);
    _mm512_mask_storeu_ps(out + n, some, _mm512_fmadd_ps(product, scale, before));
  }
}

}  // namespace raggedmoe::quantized_pairs

#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#else  // elsewhere nobody calls them

namespace raggedmoe::quantized_pairs {
bool run_here() { return false; }
bool takes(const QuantizedPart&) { return false; }
void multiply(int64_t, const QuantizedPart&, const BFloat16*, int64_t, float*, int64_t, float*, float*) {}
void decode(const QuantizedPart&, BFloat16*) {}
void scale_columns(const float*, const float*, int64_t, bool, float*) {}
}  // namespace raggedmoe::quantized_pairs

#endif
