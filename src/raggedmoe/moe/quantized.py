"""Which layers run on quantised expert weights, for inference: those on one device, with sizes for each expert."""

from typing import Any

from raggedmoe.kernels.qarray import Quantized, check_operand
from raggedmoe.moe.config import MoEConfig, strategy_name
from raggedmoe.moe.execution import MoEExecution
from raggedmoe.params import Params

EXPERT_MATRICES = ("wi_0", "wi_1", "wo")


def check_quantized_experts(params: Params, config: MoEConfig, execution: MoEExecution, mesh: Any) -> Params:
    """Require that a layer can run on those of its experts' matrices that are quantised; return the parameters."""
    quantized = [name for name, array in params.items() if isinstance(array, Quantized)]
    if not quantized:
        return params
    reason = None
    strategy = strategy_name(config, execution)
    if execution.quantization is not None:
        reason = "the execution's quantization quantises arrays; leave it out"
    elif not set(quantized) <= set(EXPERT_MATRICES):
        reason = f"{sorted(set(quantized) - set(EXPERT_MATRICES))} are multiplied as arrays; dequantise them"
    elif mesh is not None:
        reason = "on a mesh experts are split and gathered as arrays; dequantise them, or run on one device"
    elif strategy != "local":
        reason = f"strategy={strategy!r} multiplies by all experts at once; use strategy='local'"
    elif execution.width_chunks > 1:
        reason = "a part of the width may begin within a block that shares a scale; use width_chunks=1"
    if reason is not None:
        raise ValueError(f"expected arrays as {', '.join(quantized)}, got quantised ones: {reason}")
    return {**params, **{name: check_operand("the MoE layer", name, params[name], "G F D") for name in quantized}}
