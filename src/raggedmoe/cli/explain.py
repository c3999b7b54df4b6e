"""`raggedmoe explain`: which kernel would run, and why not the others."""

from dataclasses import replace
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import tyro
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding

from raggedmoe import compat
from raggedmoe.cli.layer_choice import parse_layer
from raggedmoe.hardware import Hardware, hardware_by_name, target_hardware
from raggedmoe.interop.named_model import named_model
from raggedmoe.kernels.arrays import FLOATS
from raggedmoe.kernels.proof import read_certificates
from raggedmoe.kernels.qarray import FORMATS, QArray
from raggedmoe.kernels.quant_config import QuantConfig
from raggedmoe.kernels.registry import BACKWARD, FORWARD, Call, Candidate, KernelChoice, candidates, record_selections
from raggedmoe.models.config import ModelConfig
from raggedmoe.models.decoder import decode
from raggedmoe.models.families.llama4 import LAYERS
from raggedmoe.models.parameters import param_specs
from raggedmoe.moe.config import EXPERT_MATRICES, MoEConfig, check_execution
from raggedmoe.moe.execution import OLDER_BACKENDS, MoEExecution
from raggedmoe.moe.layer import moe_route_and_compute
from raggedmoe.names import check_known
from raggedmoe.train.settings.resolve import make_execution, make_model
from raggedmoe.train.settings.words import read_words


def explain(
    words: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="[MODEL] [KEY=VALUE ...]")] = (),
    model: str | None = None,
    shape: str | None = None,
    hardware: str | None = None,
    jax_version: Annotated[str, tyro.conf.arg(name="jax")] = compat.JAX_VERSION,
    dtype: str = "bfloat16",
    experts: str | None = None,
    moe_backend: str = "auto",
) -> int:
    """Print which kernel each operation of a layer would use, in each direction, and why the others would not.

    Nothing is computed and no such hardware is needed: the layer is traced with shapes alone. A model may have other
    sizes and kernels, in the words of `raggedmoe train`:

      raggedmoe explain olmoe num_experts=32 use_ragged_sort=true ragged_gather_fallback=true --hardware v6e

    Args:
        words: a model, and settings as `raggedmoe train` takes them.
        model: a public model, such as deepseek-v3, or a folder with one: its MoE layer and its attention.
        shape: sizes of a layer, as T=2048,D=512,F=1024,E=16,K=2.
        hardware: the chip to choose for, such as tpu7x; this machine's by default.
        jax_version: the JAX version to choose for; the one installed by default.
        dtype: type of activations.
        experts: the format of quantised expert weights, such as int8: with a scale for each channel, of mxfp4 for 32.
        moe_backend: the bundle of strategy and kernels to explain.
    """
    check_known("dtype", dtype, FLOATS)
    if experts is not None:
        check_known("format of experts", experts, FORMATS)
    moe_backend = OLDER_BACKENDS.get(moe_backend, moe_backend)
    chip = target_hardware() if hardware is None else hardware_by_name(hardware)
    decoder: ModelConfig | None = None
    kernels: KernelChoice | None = None
    quantization: QuantConfig | None = None
    if words:
        if model is not None or shape is not None:
            raise ValueError(f"expected a model and settings, or --model or --shape; got both, {' '.join(words)!r}")
        decoder, asked = settings_model(words, chip)
        title, config, num_tokens = " ".join(words), decoder.moe, 4096
        moe_backend = asked.moe_backend if moe_backend == "auto" else moe_backend
        kernels, quantization = asked.kernels, asked.quantization
    else:
        title, config, num_tokens = parse_layer(model, shape)
        if model is not None and model not in LAYERS:
            decoder = named_model(model)
    console = Console()
    console.print(f"[bold]{title}[/] on [bold]{chip.name}[/], JAX {jax_version}, {dtype}, moe_backend={moe_backend}")
    if experts is not None:
        console.print(_native_formats(chip, experts))
    execution = MoEExecution(moe_backend=moe_backend, kernels=kernels, quantization=quantization)
    check_execution(config, execution)
    choices = execution.kernel_choice
    calls = layer_calls(config, num_tokens, dtype, _traced_backend(execution, chip), experts, quantization)
    attention = attention_calls(decoder, num_tokens, dtype) if decoder is not None else []
    if not calls:
        console.print("\nIt calls no kernel of ours: every expert on every token, by einsum.")
    fused = [] if quantization is not None else layer_calls(config, num_tokens, dtype, "expert_ffn", experts)
    fused = [call for call in fused if call.operation == "expert_ffn"]
    instead = {} if any(call.operation == "expert_ffn" for call in calls) else _by_shapes(fused)
    for heading, directions in [*_by_shapes(attention).items(), *_by_shapes(calls).items(), *instead.items()]:
        if heading in instead:
            console.print("\nThis layer does not use it; with moe_backend='expert_ffn' it would:")
        lines = {}
        for call in directions:
            choice = getattr(choices, call.operation, "auto")
            looked_at = candidates(call, choice, chip, jax_version=jax_version, certificates=read_certificates())
            lines[call.direction] = _lines(looked_at)
        if len(lines) == 2 and lines[FORWARD] == lines[BACKWARD]:
            lines = {"both directions": lines[FORWARD]}
        for direction, text in lines.items():
            console.print(f"\n[bold]{escape(heading[0])}[/], {direction}: [dim]{escape(heading[1])}[/]")
            for line in text:
                console.print(Padding(line, (0, 0, 0, 2)))
    return 0


def _native_formats(chip: Hardware, qtype: str) -> str:
    """Say whether a chip multiplies a format itself, and how fast beside bfloat16."""
    if qtype not in chip.native_formats:
        others = f", but {' and '.join(chip.native_formats)}" if chip.native_formats else ""
        return f"{chip.name} does not multiply {qtype} natively{others}: kernels emulate or widen it"
    flops = chip.int8_flops if qtype == "int8" else chip.fp8_flops
    assert flops is not None
    assert chip.bf16_flops is not None
    return (
        f"{chip.name} multiplies {qtype} natively, {flops / 1e12:,.0f} TFLOP/s beside {chip.bf16_flops / 1e12:,.0f} of "
        "bfloat16; what each kernel does is said below"
    )


def settings_model(words: tuple[str, ...], chip: Hardware) -> tuple[ModelConfig, MoEExecution]:
    """Read from the words of `raggedmoe train` which model they describe, and how its MoE layers run on that chip."""
    config = read_words(words)
    model, plan = make_model(config, chip), config.mesh.plan.resolve(config.mesh.num_devices)
    return model, make_execution(config, model, plan).moe


def _traced_backend(execution: MoEExecution, chip: Hardware) -> str:
    """Choose a backend whose calls are those of a layer on a chip, whatever kernels it names for them.

    These need not run on this machine. The calls of "auto" depend on the chip: only CPUs' is traced as it is.
    """
    backend = execution.backend
    if backend.fused or backend.strategy == "dense":
        return "expert_ffn" if backend.fused else execution.moe_backend
    fuses = chip.platform == "cpu" and execution.moe_backend == execution.kernel_choice.grouped_matmul == "auto"
    return "auto" if fuses else "ragged_dot"


def layer_calls(
    config: MoEConfig,
    num_tokens: int,
    dtype: str,
    moe_backend: str,
    experts: str | None = None,
    quantization: QuantConfig | None = None,
) -> list[Call]:
    """List the distinct kernel calls that the layer makes, by tracing it with shapes alone.

    ``experts``: the format of quantised expert weights. ``quantization``: what is quantised on the way.
    """
    if quantization is not None:  # of which the calls of any key are the same
        quantization = replace(quantization, stochastic_rounding=False)
    execution = MoEExecution(moe_backend=moe_backend, quantization=quantization)
    params: dict[str, Any] = {name: jax.ShapeDtypeStruct(s.shape, s.dtype) for name, s in config.param_specs().items()}
    if experts is not None:
        params |= {
            name: _quantized_struct(name, params[name].shape, experts) for name in EXPERT_MATRICES if name in params
        }
    x = jax.ShapeDtypeStruct((num_tokens, config.model_dim), jnp.dtype(dtype))

    def forward(x: Any, params: Any) -> Any:
        return moe_route_and_compute(x, params, config, execution).output

    with record_selections() as selections:
        jax.eval_shape(forward, x, params)
    return list({str(selection.call): selection.call for selection in selections}.values())


def _quantized_struct(name: str, shape: tuple[int, ...], qtype: str) -> QArray:
    """Return the shapes of quantised experts, with scales along the dimension that is not summed over, or of 32."""
    summed = 1 if name == "wo" else 2
    scale = [size if dim != summed else 1 for dim, size in enumerate(shape)]
    dtype = "uint8" if qtype == "mxfp4" else qtype
    if qtype == "mxfp4":
        scale[summed] = max(1, shape[summed] // 32)
        shape = (*shape[:-1], shape[-1] // 2)
    scales = jax.ShapeDtypeStruct(tuple(scale), jnp.dtype("uint8" if qtype == "mxfp4" else "float32"))
    return QArray(jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)), scales, None, qtype)


def attention_calls(config: ModelConfig, num_tokens: int, dtype: str) -> list[Call]:
    """List the distinct calls of attention in a model that trains on one sequence of that many tokens."""
    config = replace(config, dtype=jnp.dtype(dtype), param_dtype=jnp.dtype(dtype))
    params = {name: jax.ShapeDtypeStruct(s.shape, s.dtype) for name, s in param_specs(config).items()}
    with record_selections() as selections:
        jax.eval_shape(
            lambda params, ids: decode(params, ids, config).hidden,
            params,
            jax.ShapeDtypeStruct((1, num_tokens), jnp.int32),
        )
    calls = [selection.call for selection in selections if selection.call.operation == "attention"]
    return list({str(call): call for call in calls}.values())


def _by_shapes(calls: list[Call]) -> dict[tuple[str, str], list[Call]]:
    """Group the calls by operation, shapes and options, both directions together."""
    grouped: dict[tuple[str, str], list[Call]] = {}
    for call in calls:
        options = " ".join(f"{name}={value}" for name, value in call.options.items() if value)
        grouped.setdefault((call.operation, f"{call.shapes} {options}".strip()), []).append(call)
    return grouped


def _lines(looked_at: tuple[Candidate, ...]) -> list[str]:
    """Write a line for the chosen implementation, then one for each other with its reason."""
    chosen = next((candidate for candidate in looked_at if candidate.reason is None), None)
    lines = [] if chosen else ["[red]none can run[/]"]
    for candidate in sorted(looked_at, key=lambda candidate: candidate is not chosen):
        name, level = candidate.implementation.name, candidate.level.name.lower()
        if candidate is chosen:
            note = f"; note: {candidate.note}" if candidate.note else ""
            lines.append(f"[green]● {name:<10}[/] {level} ({escape(candidate.shown_by)}){escape(note)}")
        else:
            reason = candidate.reason or f"could run, but {chosen.implementation.name if chosen else '?'} comes first"
            lines.append(f"[dim]○ {name:<10} {escape(reason)}[/]")
    return lines
