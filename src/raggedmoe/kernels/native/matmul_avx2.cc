// The tile kernels by AVX2, in a namespace that nothing else shares: what is compiled outside the pragmas runs anywhere.
#include <cmath>
#include <cstdint>

#include "matmul_types.h"

#ifdef __x86_64__
#include <immintrin.h>

#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#endif

namespace raggedmoe::avx2 {
#define RAGGEDMOE_LANES 8
#define RAGGEDMOE_MR 4
#define RAGGEDMOE_STREAM(p, v) _mm256_stream_ps(p, (__m256)(v))
#define RAGGEDMOE_FENCE _mm_sfence
#include "matmul.inc"
#include "activation.inc"
}  // namespace raggedmoe::avx2

#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

const raggedmoe::Tables raggedmoe::avx2::TABLES = {table<float>(), table<BFloat16>()};
#endif
