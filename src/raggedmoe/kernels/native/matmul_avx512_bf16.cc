// The tile kernels by AVX-512's dot products of bfloat16, in a namespace that nothing else shares: what is compiled outside
// the pragmas runs anywhere.
#include <cmath>
#include <cstdint>

#include "matmul_types.h"

#ifdef __x86_64__
#include <immintrin.h>

#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx512f,avx512vl,avx512bw,avx512dq,avx512bf16,avx2,fma"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512vl,avx512bw,avx512dq,avx512bf16,avx2,fma")
#endif

namespace raggedmoe::avx512_bf16 {
#define RAGGEDMOE_LANES 16
#define RAGGEDMOE_MR 8
#define RAGGEDMOE_STREAM(p, v) _mm512_stream_ps(p, (__m512)(v))
#define RAGGEDMOE_FENCE _mm_sfence
#define RAGGEDMOE_DOT(sums, a, b) (Vec)_mm512_dpbf16_ps((__m512)(sums), (__m512bh)(a), (__m512bh)(b))
#define RAGGEDMOE_NARROW(v) _mm512_cvtneps_pbh((__m512)(v))
#include "matmul.inc"
#include "activation.inc"
}  // namespace raggedmoe::avx512_bf16

#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

const raggedmoe::Kernels<raggedmoe::BFloat16> raggedmoe::avx512_bf16::TABLE = table<BFloat16>();
#endif
