"""LoRA: small trained matrices beside frozen ones, ``W + scale · B A``, declared as parameters like all others.

An adapter of a matrix is two parameters, named after it: ``…_lora_a`` brings its inputs to ``rank`` numbers, and
``…_lora_b``, which begins as zeros, brings those to its outputs. Both have the matrix's own layers and experts in
front, then the rank, so that the rank is never the minor dimension. Initialisation, sharding, stacking, the scan and
checkpoints take them by their axes' names. Hu et al. (2021), https://arxiv.org/abs/2106.09685.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from raggedmoe.kernels.arrays import accumulator, matmul_precision
from raggedmoe.names import check_known
from raggedmoe.params import Params, ParamSpec, Specs, check_sizes, contracted_axes

RANK = "lora_rank"  # the axis between an adapter's two matrices
A, B = "_lora_a", "_lora_b"
ROUTERS = ("frozen", "trained")
LEADING_AXES = ("layer", "expert")  # of which each has its own matrix, and its own adapter
GROUPS = {  # what a target stands for, by the beginnings of the parameters' names in a layer
    "attention": ("attention.",),
    "mlp": ("mlp.", "moe.shared_"),
    "experts": ("moe.wi_", "moe.wo"),
}
# Matrices that are one linear layer in the checkpoints of Hugging Face share its first matrix.
ONE_LINEAR = {"k_b": "kv_b", "v_b": "kv_b"}


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Which matrices of a model have an adapter, and how large it is. All other parameters are frozen."""

    rank: int  # the inner width of each adapter; PEFT's r
    alpha: float = 32.0  # an adapter's product is multiplied by alpha / rank
    # "attention", "mlp" (dense and shared ones), "experts", or matrices by name: "attention.wq", "moe.wi_0", …
    targets: tuple[str, ...] = tuple(GROUPS)
    router: str = "frozen"  # or "trained": whole, without an adapter, as it is small

    def __post_init__(self) -> None:
        check_sizes(self, "rank")
        check_known("router", self.router, ROUTERS)
        if not 0 < self.alpha < float("inf"):
            raise ValueError(f"expected alpha > 0, got {self.alpha}")
        if not self.targets or len(set(self.targets)) < len(self.targets):
            raise ValueError(f"expected targets, each once, out of {', '.join(GROUPS)} or matrices, got {self.targets}")

    @property
    def scale(self) -> float:
        """The factor of an adapter's product."""
        return self.alpha / self.rank

    def has_target(self, name: str) -> bool:
        """Tell whether a matrix has an adapter, by its name in a layer."""
        part, _, leaf = name.rpartition(".")
        if f"{part}.{ONE_LINEAR.get(leaf, leaf)}" in self.targets:
            return True
        return any(name.startswith(GROUPS[target]) for target in self.targets if target in GROUPS)


def with_adapters(specs: Specs, lora: LoraConfig | None, prefix: str = "") -> dict[str, ParamSpec]:
    """Freeze parameters, and declare beside them the adapters of those that have one; without LoRA change nothing.

    ``prefix`` and a name together are a parameter's name in its layer.
    """
    if lora is None:
        return dict(specs)
    declared: dict[str, ParamSpec] = {}
    for name, spec in specs.items():
        is_router = name.startswith("router_")
        declared[name] = spec if is_router and lora.router == "trained" else replace(spec, updated_by=None)
        if not is_router and lora.has_target(f"{prefix}{name}") and is_matrix(spec):
            declared |= _adapter(name, spec, lora.rank)
    return declared


def check_adapted(specs: Specs, lora: LoraConfig | None) -> Specs:
    """Require that a layer with LoRA has an adapter, and return what it declares; else nothing of it would learn."""
    if lora is not None and not any(map(is_adapter, specs)):
        raise ValueError(
            f"lora: expected targets that this layer has, such as experts, mlp or moe.wo, got "
            f"{', '.join(lora.targets)}; name one of its matrices, or leave out lora"
        )
    return specs


def is_matrix(spec: ParamSpec) -> bool:
    """Tell whether a parameter is a matrix, or one for each layer and expert, with outputs and inputs."""
    inputs = contracted_axes(spec)
    return bool(inputs) and any(dim not in (*inputs, *_lead(spec)) for dim in spec.axes)


def is_adapter(name: str) -> bool:
    """Tell whether a parameter is a part of an adapter."""
    return name.endswith((A, B))


def first_matrix(name: str) -> str:
    """Return the name of the first matrix of a parameter's adapter."""
    part, dot, leaf = name.rpartition(".")
    return f"{part}{dot}{ONE_LINEAR.get(leaf, leaf)}{A}"


def _lead(spec: ParamSpec) -> tuple[str, ...]:
    return tuple(dim for dim in spec.axes if dim in LEADING_AXES)


def _adapter(name: str, spec: ParamSpec, rank: int) -> dict[str, ParamSpec]:
    sizes, lead, inputs = {**dict(zip(spec.axes, spec.shape)), RANK: rank}, _lead(spec), contracted_axes(spec)
    outputs = tuple(dim for dim in spec.axes if dim not in (*lead, *inputs))

    def part(dims: tuple[str, ...], **how: Any) -> ParamSpec:
        axes = (*lead, RANK, *dims)
        return ParamSpec(shape=tuple(sizes[dim] for dim in axes), dtype=jnp.float32, axes=axes, **how)

    return {
        first_matrix(name): part(inputs, contracts=spec.contracts),
        f"{name}{B}": part(outputs, contracts=RANK, init="zeros"),
    }


def scale_adapters(weights: Params, lora: LoraConfig | None) -> Params:
    """Multiply the first matrices of dense weights' adapters by the factor of their product."""
    if lora is None:
        return weights
    return {name: value * lora.scale if name.endswith(A) else value for name, value in weights.items()}


def dense_adapter(x: Float[Array, "T I"], weights: Params, name: str) -> Float[Array, "T O"] | None:
    """Multiply rows by the adapter of a dense weight, whose scale is in it; None: it has none. The sums are float32."""
    if f"{name}{B}" not in weights:
        return None
    first, second = (weights[part].astype(x.dtype) for part in (first_matrix(name), f"{name}{B}"))
    rank = first.shape[0]
    options: dict[str, Any] = {"precision": matmul_precision(x.dtype), "preferred_element_type": accumulator(x.dtype)}
    low = jnp.einsum("ti,ri->tr", x, first.reshape(rank, -1), **options).astype(x.dtype)
    return jnp.einsum("tr,ro->to", low, second.reshape(rank, -1), **options)


def add_grouped_adapter(
    sums: Float[Array, "R O"],
    rows: Float[Array, "R I"],
    weights: Params,
    name: str,
    lora: LoraConfig | None,
    matmul: Callable[..., Callable[[jax.Array, jax.Array], jax.Array]],
) -> Float[Array, "R O"]:
    """Add what the adapters of the rows' experts make of them; ``matmul`` makes a grouped matmul of the rows."""
    if lora is None or f"{name}{B}" not in weights:
        return sums
    low = matmul(transpose_rhs=True)(rows, weights[f"{name}{A}"]) * lora.scale
    return sums + matmul(transpose_rhs=False)(low.astype(rows.dtype), weights[f"{name}{B}"])


def merged_weight(weight: jax.Array, spec: ParamSpec, first: jax.Array, second: jax.Array, scale: float) -> jax.Array:
    """Compute ``W + scale · B A`` in float32, or the weight's type if that is wider, rounded once."""
    lead, inputs = _lead(spec), contracted_axes(spec)
    outputs = tuple(dim for dim in spec.axes if dim not in (*lead, *inputs))
    letter = {dim: chr(ord("a") + i) for i, dim in enumerate((*spec.axes, RANK))}
    terms = [(*lead, RANK, *inputs), (*lead, RANK, *outputs), spec.axes]
    a, b, whole = ("".join(letter[dim] for dim in term) for term in terms)
    wide = accumulator(weight.dtype)
    options: dict[str, Any] = {"precision": matmul_precision(jnp.dtype(wide)), "preferred_element_type": wide}
    product = jnp.einsum(f"{a},{b}->{whole}", first.astype(wide), second.astype(wide), **options)
    return (weight.astype(wide) + scale * product).astype(weight.dtype)
