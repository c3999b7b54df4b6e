// The choice of an instruction set: the best one that runs here, when the kernels are first asked for.
#include <algorithm>
#include <cstdlib>
#include <string>

#include "matmul_types.h"

namespace raggedmoe {

namespace {
enum class Isa { BASELINE, AVX2, AVX512, AVX512_BF16 };
constexpr const char* NAMES[] = {"baseline", "avx2", "avx512", "avx512_bf16"};

Isa best_isa() {
  Isa best = Isa::BASELINE;
#ifdef __x86_64__
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    best = Isa::AVX2;
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq"))
      best = __builtin_cpu_supports("avx512bf16") ? Isa::AVX512_BF16 : Isa::AVX512;
  }
#endif
  const char* name = std::getenv("RAGGEDMOE_CPU_ISA");
  const std::string wanted = name == nullptr ? "" : name;
  for (Isa isa : {Isa::BASELINE, Isa::AVX2, Isa::AVX512})
    if (wanted == NAMES[static_cast<int>(isa)]) return std::min(best, isa);
  return best;
}

Isa isa() {
  static const Isa chosen = best_isa();
  return chosen;
}
}  // namespace

template <class T>
const Kernels<T>& kernels() {
#ifdef __x86_64__
  if constexpr (std::is_same_v<T, BFloat16>)
    if (isa() == Isa::AVX512_BF16) return avx512_bf16::TABLE;
#endif
  static const Tables& chosen = []() -> const Tables& {
#ifdef __x86_64__
    if (isa() >= Isa::AVX512) return avx512::TABLES;
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

extern "C" const char* raggedmoe_isa() { return raggedmoe::NAMES[static_cast<int>(raggedmoe::isa())]; }
