"""Declarations of parameters: shape, dtype, named axes and initialiser, for initialisation, sharding and import."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp


@dataclass(frozen=True, kw_only=True)
class ParamSpec:
    """The declaration of one parameter. Initialisation, sharding and import use the names in ``axes``."""

    shape: tuple[int, ...]
    dtype: Any
    axes: tuple[str, ...]
    init: str = "normal"  # "normal" (scaled by the width of what it contracts), "zeros" or "ones"
    contracts: str | tuple[str, ...] | None = None  # the axis or axes that a matmul with this parameter sums over
    # What moves it in training: its "gradient", the experts' "load" (a selection bias), or nothing, None: it is frozen.
    updated_by: str | None = "gradient"

    def __post_init__(self) -> None:
        if len(self.shape) != len(self.axes):
            raise ValueError(f"expected one axis name for each of the dimensions {self.shape}, got {self.axes}")

    @property
    def trained(self) -> bool:
        """Whether it learns by gradient."""
        return self.updated_by == "gradient"

    @property
    def num_elements(self) -> int:
        """The product of the shape."""
        return math.prod(self.shape)


Specs = Mapping[str, ParamSpec]
Params = Mapping[str, Any]  # arrays by the names of their `ParamSpec`, all of a model or a layer's, or some of them
LARGEST_SIZE = 2**31 - 1  # the largest size of a dimension that an int32 can count
CONSTANTS = {"zeros": 0, "ones": 1}


def check_sizes(config: Any, *names: str) -> None:
    """Require that these fields of a configuration are sizes: positive integers that an int32 holds."""
    for name in names:
        value = getattr(config, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{type(config).__name__}: expected {name} to be a positive integer, got {value!r}")
        if value > LARGEST_SIZE:
            raise ValueError(f"{type(config).__name__}: expected {name} to be at most {LARGEST_SIZE}, got {value}")


def check_divides(name: str, size: int, by: str, number: int) -> None:
    """Require that a number divides a size, both by the names of their settings."""
    if size % number:
        fitting, padded = divisors(size), math.ceil(size / number) * number
        raise ValueError(
            f"{name}={size} is not divisible by {by}={number}; use {by} in {fitting}, or pad with {name}={padded}"
        )


def divisors(size: int) -> list[int]:
    """List the divisors of ``size`` in ascending order, for errors about a number that does not divide it."""
    small = [number for number in range(1, math.isqrt(size) + 1) if size % number == 0]
    return sorted({*small, *(size // number for number in small)})


def contracted_axes(spec: ParamSpec) -> tuple[str, ...]:
    """Return the axes that a matmul with a parameter sums over; none: it is no weight of a matmul."""
    return (spec.contracts,) if isinstance(spec.contracts, str) else spec.contracts or ()


def stack_spec(spec: ParamSpec, num: int, axis: str = "layer") -> ParamSpec:
    """Declare ``num`` copies of a parameter stacked along a new leading dimension, by default the layers of a scan."""
    return replace(spec, shape=(num, *spec.shape), axes=(axis, *spec.axes))


# Every draw of its own costs about half a second of compilation on a CPU: small parameters share one.
SHARED_DRAW_ELEMENTS = 2**20


def _scale(name: str, spec: ParamSpec) -> float:
    """Return the standard deviation of a new parameter: 1 / sqrt(fan-in), the size of the dimensions it contracts."""
    if spec.init != "normal" or spec.contracts is None:
        raise ValueError(f"{name}: expected init 'zeros', 'ones', or 'normal' with what it contracts, got {spec}")
    return math.prod(spec.shape[spec.axes.index(axis)] for axis in contracted_axes(spec)) ** -0.5


def init_params(specs: Specs, key: jax.Array) -> dict[str, jax.Array]:
    """Draw initial values for all declared parameters."""
    random_specs = {name: spec for name, spec in specs.items() if spec.init not in CONSTANTS}
    small_specs = {name: spec for name, spec in random_specs.items() if spec.num_elements < SHARED_DRAW_ELEMENTS}
    keys = jax.random.split(key, len(specs) + 1)
    shared_draw = jax.random.normal(keys[-1], (sum(spec.num_elements for spec in small_specs.values()),), jnp.float32)
    params, start = {}, 0
    for (name, spec), param_key in zip(specs.items(), keys):
        if spec.init in CONSTANTS:
            params[name] = jnp.full(spec.shape, CONSTANTS[spec.init], spec.dtype)
            continue
        if name in small_specs:
            values = shared_draw[start : start + spec.num_elements].reshape(spec.shape)
            start += spec.num_elements
        else:
            values = jax.random.normal(param_key, spec.shape, jnp.float32)
        params[name] = (values * _scale(name, spec)).astype(spec.dtype)
    return params


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
