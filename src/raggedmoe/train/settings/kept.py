"""Which frozen matrices a run of adapters leaves in the 8 bits or fewer that they are stored in."""

from raggedmoe.interop.load import read_kept_forms
from raggedmoe.kernels.qarray import QuantizedForm
from raggedmoe.kernels.registry import quantizes_why_not
from raggedmoe.models.config import ModelConfig
from raggedmoe.models.execution import ModelExecution
from raggedmoe.models.parameters import param_specs
from raggedmoe.moe.config import EXPERT_MATRICES, check_execution
from raggedmoe.params import Specs
from raggedmoe.sharding.plan import Plan
from raggedmoe.train.settings.config import TrainConfig


def find_kept(
    config: TrainConfig, model: ModelConfig, execution: ModelExecution, plan: Plan
) -> tuple[dict[str, QuantizedForm], tuple[str, ...]]:
    """Find which frozen matrices stay quantised, and how, and what the user should be told of it.

    They do where the folder of the adapters' base has them so and nothing prevents it, which ``keep_quantised=true``
    requires.
    """
    asked, folder = config.execution.keep_quantised, config.base_folder
    if model.lora is None or folder is None or asked is False:
        return {}, ()
    specs = param_specs(model)
    forms = {name: form for name, form in read_kept_forms(folder).items() if name in specs}
    shown = config.shown("keep_quantised")
    if not forms:
        if asked:
            raise ValueError(
                f"{shown}: expected a folder whose matrices are stored in 8 bits or fewer, in blocks that fit, got "
                f"{folder}; leave it out, or quantise the folder first (`raggedmoe quantise {folder} OUT --to fp8`)"
            )
        return {}, ()
    why_not = _why_not(model, execution, plan, forms, specs)
    if why_not is None:
        return forms, ()
    if asked:
        raise ValueError(f"{shown}: {why_not}; or leave it out, and they are dequantised")
    return {}, (f"the matrices of {folder} are dequantised, as they cannot stay as they are stored: {why_not}",)


def _why_not(
    model: ModelConfig, execution: ModelExecution, plan: Plan, forms: dict[str, QuantizedForm], specs: Specs
) -> str | None:
    """Say why the matrices of a run cannot stay quantised, which experts decide nearly alone; None: they can."""
    kept = [name for name in EXPERT_MATRICES if any(param.endswith(f".moe.{name}") for param in forms)]
    try:
        check_execution(model.moe_layer, execution.moe, kept)
        for name, form in forms.items():
            plan.stored_parts(name, specs[name], form)
    except ValueError as error:  # of these a block of a scale, or a byte of two values, would be cut
        return str(error)
    return quantizes_why_not("grouped_matmul", execution.moe.kernel_choice.grouped_matmul)
