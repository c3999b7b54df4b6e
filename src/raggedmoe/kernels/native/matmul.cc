// The choice of an instruction set: the best one that runs here, when the kernels are first asked for.
#include <algorithm>
#include <cstdlib>
#include <string>

#include "matmul_types.h"

namespace raggedmoe {

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
  static const Tables& chosen = []() -> const Tables& {
#ifdef __x86_64__
    if (isa() == Isa::AVX512) return avx512::TABLES;
    if (isa() == Isa::AVX2) return avx2::TABLES;
#endif
    return baseline::TABLES;
  }();
  if constexpr (std::is_same_v<T, float>)
    return chosen.float32;
  else
    return chosen.bfloat16;
}
template const Kernels<float>& kernels<float>();
template const Kernels<BFloat16>& kernels<BFloat16>();

}  // namespace raggedmoe

extern "C" const char* raggedmoe_isa() {
  const raggedmoe::Isa isa = raggedmoe::isa();
  return isa == raggedmoe::Isa::AVX512 ? "avx512" : isa == raggedmoe::Isa::AVX2 ? "avx2" : "baseline";
}
