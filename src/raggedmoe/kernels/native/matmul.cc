// The tile kernels, compiled once for each instruction set; the best one that runs here is chosen when first asked for.
#include "matmul_types.h"

#include <cmath>
#include <cstdlib>
#include <string>

namespace raggedmoe {

#ifdef __x86_64__
#pragma GCC push_options
#pragma GCC target("avx512f,avx512vl,avx512bw,avx512dq,avx2,fma")
namespace avx512 {
#define RAGGEDMOE_LANES 16
#define RAGGEDMOE_MR 12
#include "matmul.inc"
#include "activation.inc"
#undef RAGGEDMOE_LANES
#undef RAGGEDMOE_MR
}  // namespace avx512
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx2,fma")
namespace avx2 {
#define RAGGEDMOE_LANES 8
#define RAGGEDMOE_MR 6
#include "matmul.inc"
#include "activation.inc"
#undef RAGGEDMOE_LANES
#undef RAGGEDMOE_MR
}  // namespace avx2
#pragma GCC pop_options
#endif
namespace baseline {  // SSE2 on x86, NEON on arm64
#define RAGGEDMOE_LANES 4
#define RAGGEDMOE_MR 4
#include "matmul.inc"
#include "activation.inc"
}  // namespace baseline

namespace {
enum class Isa { BASELINE, AVX2, AVX512 };

Isa best_isa() {
  Isa best = Isa::BASELINE;
#ifdef __x86_64__
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    best = Isa::AVX2;
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq"))
      best = Isa::AVX512;
  }
#endif
  const char* name = std::getenv("RAGGEDMOE_CPU_ISA");
  const std::string wanted = name == nullptr ? "" : name;
  if (wanted == "baseline") return Isa::BASELINE;
  if (wanted == "avx2") return std::min(best, Isa::AVX2);
  return best;
}

Isa isa() {
  static const Isa chosen = best_isa();
  return chosen;
}
}  // namespace

template <class T>
const Kernels<T>& kernels() {
  static const Kernels<T> chosen = [] {
#ifdef __x86_64__
    if (isa() == Isa::AVX512) return avx512::table<T>();
    if (isa() == Isa::AVX2) return avx2::table<T>();
#endif
    return baseline::table<T>();
  }();
  return chosen;
}
template const Kernels<float>& kernels<float>();
template const Kernels<BFloat16>& kernels<BFloat16>();

}  // namespace raggedmoe

extern "C" const char* raggedmoe_isa() {
  const raggedmoe::Isa isa = raggedmoe::isa();
  return isa == raggedmoe::Isa::AVX512 ? "avx512" : isa == raggedmoe::Isa::AVX2 ? "avx2" : "baseline";
}
