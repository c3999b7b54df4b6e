// `grouped_matmul` with a quantised right operand, against loops in float64 over what its codes mean by their formulas.
#include <iterator>

#include "checks.h"

extern "C" {
XLA_FFI_Error* raggedmoe_quantized_matmul(XLA_FFI_CallFrame*);
}

namespace {

enum Format : int64_t { INT8, E4M3, E5M2, MXFP4 };

struct Case {
  const char* name;
  Format format;
  std::vector<int32_t> bounds;
  int64_t rows, inner, width, block_inner, block_width;  // 0: one scale for all
  bool transposed, exponents;
};

double of_float(int64_t code, int mantissa_bits, int exponent_bits, int bias) {
  const double mantissa = code % (1 << mantissa_bits) / double(1 << mantissa_bits);
  const int64_t exponent = (code >> mantissa_bits) % (1 << exponent_bits);
  const double size = exponent == 0 ? mantissa * std::exp2(1 - bias) : (1 + mantissa) * std::exp2(exponent - bias);
  return code >> (mantissa_bits + exponent_bits) ? -size : size;
}

// The value at a place of the matrices, which for mxfp4 is half a byte.
double value_at(const Case& c, const Array<uint8_t>& codes, int64_t at) {
  if (c.format == INT8) return static_cast<int8_t>(codes[at]);
  if (c.format == E4M3) return of_float(codes[at], 3, 4, 7);
  if (c.format == E5M2) return of_float(codes[at], 2, 5, 15);
  return of_float(at % 2 ? codes[at / 2] >> 4 : codes[at / 2] & 15, 1, 2, 1);
}

template <class T, class Scale>
void check(const Case& c) {
  const int64_t groups = c.bounds.size() - 1;
  const int64_t inner_scales = c.block_inner ? c.inner / c.block_inner : 1;
  const int64_t width_scales = c.block_width ? c.width / c.block_width : 1;
  const auto shape = [&](int64_t inner, int64_t width) {
    return c.transposed ? std::vector<int64_t>{groups, width, inner} : std::vector<int64_t>{groups, inner, width};
  };
  Array<T> lhs = drawn<T>({c.rows, c.inner}, 1);
  std::vector<int64_t> stored = shape(c.inner, c.width);
  if (c.format == MXFP4) stored.back() /= 2;
  Array<uint8_t> codes(stored);
  for (int64_t i = 0; i < codes.size(); ++i) {
    codes[i] = random_numbers() % 256;
    // Neither NaN nor infinity, and no value so large that it hides all others.
    if (c.format == E5M2) codes[i] = (codes[i] & 0x83) | std::min(codes[i] & 0x7c, 0x44);
    if (c.format == E4M3 && (codes[i] & 0x7f) == 0x7f) codes[i] = 0;
  }
  Array<Scale> scale(shape(inner_scales, width_scales));
  for (int64_t i = 0; i < scale.size(); ++i)
    if constexpr (std::is_same_v<Scale, uint8_t>)
      scale[i] = 125 + random_numbers() % 4;
    else
      from_float(0.5f + (random_numbers() % 1000) / 1000.0f, scale[i]);
  Array<int32_t> bounds = integers(c.bounds, {groups + 1});
  const auto run = [&](Pool& pool) {
    std::vector<Array<T>> out;
    out.emplace_back(std::vector<int64_t>{c.rows, c.width});
    Call(pool).operand(lhs).operand(codes).operand(scale).operand(bounds).result(out[0])
        .attribute("format", int64_t{c.format}).attribute("transpose_rhs", c.transposed).run(raggedmoe_quantized_matmul);
    return out;
  };
  Exact expected(c.rows * c.width);
  for (int64_t g = 0; g < groups; ++g)
    for (int64_t r = c.bounds[g]; r < c.bounds[g + 1]; ++r)
      for (int64_t i = 0; i < c.inner; ++i)
        for (int64_t j = 0; j < c.width; ++j) {
          const int64_t bi = c.block_inner ? i / c.block_inner : 0, bj = c.block_width ? j / c.block_width : 0;
          const int64_t at = c.transposed ? (g * c.width + j) * c.inner + i : (g * c.inner + i) * c.width + j;
          const int64_t at_scale =
              c.transposed ? (g * width_scales + bj) * inner_scales + bi : (g * inner_scales + bi) * width_scales + bj;
          double factor = to_float(scale[at_scale]);
          if constexpr (std::is_same_v<Scale, uint8_t>) factor = std::exp2(scale[at_scale] - 127.0);
          expected[r * c.width + j] += to_float(lhs[r * c.inner + i]) * value_at(c, codes, at) * factor;
        }
  expect_close(c.name, "quantized_matmul", same_with_any_threads(c.name, "quantized_matmul", run)[0], expected,
               TOLERANCE<T>, false);
}

}  // namespace

int check_quantized() {
  const std::vector<int32_t> some = {1, 2, 2, 9, 22};
  const Case cases[] = {
      {"int8, channels", INT8, some, 25, 67, 131, 0, 1, true, false},
      {"int8, channels, rows in one piece", INT8, some, 25, 67, 131, 0, 1, false, false},
      {"int8, one scale for all columns", INT8, some, 25, 48, 33, 1, 0, true, false},
      {"e4m3, blocks", E4M3, some, 25, 96, 64, 32, 16, true, false},
      {"e4m3, blocks, rows in one piece", E4M3, some, 25, 96, 64, 32, 16, false, false},
      {"e5m2, narrow blocks", E5M2, some, 22, 30, 70, 3, 7, true, false},
      {"e5m2, narrow blocks, rows in one piece", E5M2, some, 22, 30, 70, 3, 7, false, false},
      {"mxfp4", MXFP4, some, 25, 96, 70, 32, 1, true, true},
      {"mxfp4, rows in one piece", MXFP4, some, 25, 96, 70, 32, 1, false, true},
      {"mxfp4, odd blocks", MXFP4, some, 25, 30, 34, 3, 1, true, true},
      {"several parts", INT8, {0, 3, 3}, 3, 512, 2100, 128, 1, false, false},
      {"several parts, transposed", INT8, {0, 3, 3}, 3, 4096, 300, 128, 1, true, false},
      {"wide blocks, few rows and many", E4M3, {0, 5, 31, 300}, 300, 256, 70, 128, 35, true, false},
      {"wide blocks, rows in one piece", E5M2, {0, 5, 31, 60}, 62, 256, 70, 128, 35, false, false},
      {"many rows, several tiles of them", E4M3, {1, 301, 301, 330}, 333, 64, 32, 32, 16, true, false},
      {"many rows, rows in one piece", E5M2, {0, 17, 77, 77}, 80, 30, 301, 3, 7, false, false},
      {"many rows, several columns of parts", MXFP4, {3, 43, 43}, 43, 32, 334, 32, 1, true, true},
      {"many rows, mxfp4, rows in one piece", MXFP4, {0, 19, 43}, 44, 64, 38, 32, 1, false, true},
      {"many rows, one scale for all columns", INT8, {0, 40}, 41, 48, 33, 1, 0, true, false},
      {"more rows than a task's", INT8, {0, 1030}, 1031, 17, 5, 0, 1, false, false},
      {"no rows", INT8, {0, 0}, 2, 8, 16, 0, 1, true, false},
  };
  for (const Case& c : cases) {
    if (c.exponents) {
      check<float, uint8_t>(c);
      check<BFloat16, uint8_t>(c);
    } else {
      check<float, float>(c);
      check<BFloat16, BFloat16>(c);
    }
  }
  return static_cast<int>(std::size(cases));
}
