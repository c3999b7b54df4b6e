// The tile kernels by what every processor has: SSE2 on x86-64, NEON on arm64.
#include <cmath>
#include <cstdint>

#include "matmul_types.h"

namespace raggedmoe::baseline {
#define RAGGEDMOE_LANES 4
#define RAGGEDMOE_MR 4
#define RAGGEDMOE_STREAM(p, v) store(p, v)
#define RAGGEDMOE_FENCE() static_cast<void>(0)
#include "matmul.inc"
#include "activation.inc"
}  // namespace raggedmoe::baseline

const raggedmoe::Tables raggedmoe::baseline::TABLES = {table<float>(), table<BFloat16>()};
