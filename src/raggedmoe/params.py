"""Parameters as declarations: shape, dtype, named axes and initialiser, written once and read by everybody."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp


@dataclass(frozen=True, kw_only=True)
class ParamSpec:
    """One parameter. ``axes`` names each dimension; initialisation, sharding and import go by those names."""

    shape: tuple[int, ...]
    dtype: Any
    axes: tuple[str, ...]
    init: str = "normal"  # "normal" (scaled by the width of what it contracts), "zeros" or "ones"
    contracts: str | None = None  # the axis that a matmul with this parameter sums over

    def __post_init__(self) -> None:
        if len(self.shape) != len(self.axes):
            raise ValueError(f"expected one axis name for each of the dimensions {self.shape}, got {self.axes}")

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


Specs = Mapping[str, ParamSpec]


def init_param(spec: ParamSpec, key: jax.Array) -> jax.Array:
    """A new value of a parameter."""
    if spec.init == "zeros":
        return jnp.zeros(spec.shape, spec.dtype)
    if spec.init == "ones":
        return jnp.ones(spec.shape, spec.dtype)
    if spec.init != "normal" or spec.contracts is None:
        raise ValueError(f"expected init 'zeros', 'ones', or 'normal' with the axis that it contracts, got {spec}")
    fan_in = spec.shape[spec.axes.index(spec.contracts)]
    return (jax.random.normal(key, spec.shape, jnp.float32) * fan_in**-0.5).astype(spec.dtype)


def init_params(specs: Specs, key: jax.Array) -> dict[str, jax.Array]:
    """New values of all parameters, each from its own key."""
    keys = jax.random.split(key, max(len(specs), 1))
    return {name: init_param(spec, k) for (name, spec), k in zip(specs.items(), keys)}


def check_param(name: str, spec: ParamSpec, array: Any, axes: tuple[str, ...]) -> None:
    """Require a tensor's axes, by name, and its shape. Swapped axes are refused even where the sizes agree."""
    expected = f"expected {name} ({', '.join(spec.axes)}) = {spec.shape}"
    got = f"got ({', '.join(axes)}) = {tuple(array.shape)}"
    if tuple(axes) != spec.axes:
        if sorted(axes) == sorted(spec.axes):
            order = tuple(axes.index(axis) for axis in spec.axes)
            raise ValueError(f"{expected}, {got}; the axes are in another order: transpose it with {order}")
        raise ValueError(f"{expected}, {got}; check which tensor this is")
    if tuple(array.shape) != spec.shape:
        raise ValueError(f"{expected}, {got}; check the configuration's sizes")


def check_params(specs: Specs, arrays: Mapping[str, Any], axes: Mapping[str, tuple[str, ...]]) -> None:
    """Require exactly the declared tensors, each with its declared axes and shape."""
    missing, unknown = sorted(specs.keys() - arrays.keys()), sorted(arrays.keys() - specs.keys())
    if missing or unknown:
        raise ValueError(f"expected the parameters {sorted(specs)}; missing {missing}, unknown {unknown}")
    for name, spec in specs.items():
        if name not in axes:
            raise ValueError(f"expected the axes of {name}, as {spec.axes}; got none: sizes alone cannot tell F from D")
        check_param(name, spec, arrays[name], tuple(axes[name]))
