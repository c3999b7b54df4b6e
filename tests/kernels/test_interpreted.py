"""Every TensorCore kernel that says it is interpreted, found by itself: value and gradients against the reference.

A case is seconds of compilation. `make test` runs some of each kernel's, on one chip after another, as tiles follow the
chip; `make test-all` and `make test-tpu` run all.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from raggedmoe.compat import JAX_VERSION, in_versions
from raggedmoe.hardware import HARDWARE
from raggedmoe.kernels.catalog import operation
from raggedmoe.kernels.example import Example, Spec
from raggedmoe.kernels.grouped_matmul import specs as grouped_matmul_specs
from raggedmoe.kernels.proof import COMPILED_CHIPS, Level, level_on
from raggedmoe.kernels.registry import OPERATIONS, CannotRunError, implementations
from raggedmoe.verify.check import check
from tests.kernels.compare import on_cpu
from tests.kernels.tpu_interpreter import RaceError, tpu_interpreter


def interpreted_chips(implementation):
    """The chips on which a kernel claims to be interpreted with this JAX."""
    name, proofs = implementation.full_name, implementation.proofs
    return [c for c in COMPILED_CHIPS if level_on(name, proofs, HARDWARE[c], JAX_VERSION, ())[0] == Level.INTERPRETED]


# A plain XLA program claims it as well, as the tests run it on a CPU: `test_contract` does.
KERNELS = [
    (name, implementation)
    for name in OPERATIONS
    for implementation in implementations(name).values()
    if interpreted_chips(implementation) and implementation.name not in on_cpu(name)
]
# Of a kernel's cases, one in so many is quick: one of each kernel, or two. The ten kernels of a fused expert and of its
# gradients take twelve seconds: `expert_ffn/test_pallas_tpu` has the first of them, with XLA's matmuls for the others.
EVERY = 30


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limit:
    """What the interpreter of some JAX versions cannot run, though the compiler takes it (docs/verify.md)."""

    implementation: str
    applies: Callable[[Example], bool]
    last_jax: str
    reason: str


LIMITS = (
    Limit(
        implementation="attention/splash",
        applies=lambda example: example.arrays["query"].shape[0] > 1,
        last_jax="0.12.0.1",
        reason="under vmap a kernel has one grid dimension more than it has dimension_semantics, and zip refuses it",
    ),
)


def cases():
    for number, (name, implementation) in enumerate(KERNELS):
        chips = interpreted_chips(implementation)
        whole = operation(name)
        specs = [
            spec
            for spec in (whole.all_specs if implementation.quantized is not None else whole.specs)
            if not spec.large
        ]
        pairs = [(spec, dtype) for spec in specs for dtype in ("float32", "bfloat16")]
        for place, (spec, dtype) in enumerate(pairs):
            chip = chips[(place // EVERY + number) % len(chips)]
            yield pytest.param(
                name,
                implementation.name,
                spec,
                dtype,
                chip,
                id=f"{name}-{implementation.name}-{spec.name}-{dtype}-{chip}",
                marks=marks_of(place + 4 * number, name, spec),
            )


def marks_of(place, name, spec):
    if place % EVERY or name == "expert_ffn":
        return [pytest.mark.slow]
    return [pytest.mark.ci] if name == "grouped_matmul" else []


def wrong(name, implementation, spec, dtype, chip):
    """The quantities that are not the reference's, races being errors; what is refused or cannot be run is skipped."""
    example = spec.example(dtype)
    for limit in LIMITS:
        here = limit.implementation == f"{name}/{implementation}" and in_versions(JAX_VERSION, None, limit.last_jax)
        if here and limit.applies(example):
            pytest.skip(f"JAX {JAX_VERSION} cannot interpret it: {limit.reason}")
    call = functools.partial(operation(name).function, **example.options, implementation=implementation, hardware=chip)
    try:
        jax.eval_shape(lambda arrays: call(**arrays), dict(example.arrays))
    except CannotRunError as refused:
        pytest.skip(" ".join(str(refused).split()))
    with tpu_interpreter():
        checks = list(check(operation(name), [implementation], spec, dtype, hardware=HARDWARE[chip]))
    assert len(checks) >= 2
    return [found for found in checks if not found.passed]


def test_our_kernels_are_found():
    found = {(name, implementation.name) for name, implementation in KERNELS}
    assert found >= {("grouped_matmul", "pallas_tpu"), ("grouped_matmul", "megablox"), ("expert_ffn", "pallas_tpu")}


@pytest.mark.parametrize(("name", "implementation", "spec", "dtype", "chip"), list(cases()))
def test_a_kernel_agrees_with_the_reference(name, implementation, spec, dtype, chip):
    assert wrong(name, implementation, spec, dtype, chip) == []


# Of one shape, so that all examples share a compilation: what varies are the groups, which the kernels read as data.
def random_groups(rng, dtype, *, cuts) -> Example:
    ends = np.sort(np.asarray(cuts))
    sizes = tuple(int(size) for size in np.diff(ends, prepend=0))
    spare = 300 - int(ends[-1])
    return grouped_matmul_specs._make(rng, dtype, sizes=sizes, inner=24, out=40, spare=spare, offset=1, groups=3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "implementation",
    [
        pytest.param(each.name, marks=[] if each.name == "pallas_tpu" else [pytest.mark.slow])
        for name, each in KERNELS
        if name == "grouped_matmul"
    ],
)
@settings(max_examples=3)
@given(cuts=st.lists(st.integers(0, 300), min_size=5, max_size=5))
def test_any_groups_in_a_buffer_are_multiplied(implementation, cuts):
    spec = Spec(name="random-groups", make=functools.partial(random_groups, cuts=cuts))
    assert wrong("grouped_matmul", implementation, spec, "float32", "v6e") == []


def racing(source, target, semaphore):
    copy = pltpu.make_async_copy(source, target, semaphore)
    copy.start()
    target[...] = jnp.zeros_like(target)
    copy.wait()


def reading_what_nobody_wrote(source, target, scratch):
    target[...] = source[...] + scratch[...]


def reading_beyond_the_end(source, target, start):
    start[0] = 4
    target[...] = source[pl.ds(start[0], 8), :]


@pytest.mark.parametrize(
    ("body", "scratch"),
    [
        (racing, pltpu.SemaphoreType.DMA),
        (reading_what_nobody_wrote, pltpu.VMEM((8, 128), jnp.float32)),
        (reading_beyond_the_end, pltpu.SMEM((1,), jnp.int32)),
    ],
)
def test_the_interpreter_sees_what_it_is_relied_on_to_see(body, scratch):
    in_vmem = pl.BlockSpec(memory_space=pltpu.VMEM)

    @jax.jit
    def kernel(source):
        shape = jax.ShapeDtypeStruct(source.shape, source.dtype)
        return pl.pallas_call(body, out_shape=shape, in_specs=[in_vmem], out_specs=in_vmem, scratch_shapes=[scratch])(
            source
        )

    def finite():
        with tpu_interpreter():
            return bool(jnp.isfinite(kernel(jnp.ones((8, 128)))).all())

    if body is reading_what_nobody_wrote:
        assert not finite()
    else:
        with pytest.raises((RaceError, jax.errors.JaxRuntimeError), match=r"race|RACE|[Oo]ut-of-bounds"):
            finite()
