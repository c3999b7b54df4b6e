"""What our Pallas kernels tell XLA that they cost, held to arithmetic."""

import functools
from importlib import import_module
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from raggedmoe.aot.shapes import example_of_shape
from raggedmoe.hardware import HARDWARE
from raggedmoe.kernels.catalog import operation
from raggedmoe.kernels.expert_ffn import pallas_tpu, pallas_tpu_kernel
from raggedmoe.kernels.expert_ffn.api import ExpertWeights
from raggedmoe.kernels.registry import OPERATIONS, implementations
from raggedmoe.kernels.value_and_gradients import value_and_gradients

CHIP = HARDWARE["v6e"]
TILE_BYTES = 8 * 128 * 4  # of HBM: what SparseCore programs write at a time


def traced(function, *args):
    device = AbstractDevice(device_kind=CHIP.device_kinds[0], num_cores=1, platform="tpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        return jax.make_jaxpr(function)(*args)


def claims(jaxpr):
    """For each kernel of a program its name and FLOPs, bytes and transcendentals; None: it claims nothing."""
    found = []
    for equation in jaxpr.eqns:
        if "cost_estimate" in equation.params:
            cost, name = equation.params["cost_estimate"], equation.params["name"]
            figures = None if cost is None else (cost.flops, cost.bytes_accessed, cost.transcendentals)
            found.append((str(name), figures))
            continue
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda leaf: hasattr(leaf, "jaxpr")):
            inner = getattr(value, "jaxpr", value)
            found += claims(inner) if hasattr(inner, "eqns") else []
    return found


def kernels_of(name, implementation):
    """List the claims for value and gradients; for expert_ffn's value alone, as its gradients are grouped matmuls."""
    example = example_of_shape(name, SHAPES[name], "bfloat16")
    function = functools.partial(operation(name).function, **example.options, implementation=implementation)
    if name == "expert_ffn":
        return claims(traced(lambda arrays: function(**arrays), dict(example.arrays)))
    return claims(traced(functools.partial(value_and_gradients, function), dict(example.arrays), example.cotangent))


def is_ours(name, implementation):
    folder = Path(import_module(f"raggedmoe.kernels.{name}").__file__).parent
    return (folder / f"{implementation}_kernel.py").exists()


OURS = [(name, each) for name in OPERATIONS for each in implementations(name) if is_ours(name, each)]

SHAPES = {
    "grouped_matmul": "R=512,I=256,O=384,G=4",
    "expert_ffn": "R=512,D=256,F=384,G=4",
    "ragged_gather": "T=64,K=2,D=256,weights=true",
    "ragged_gather_reduce": "T=64,K=2,D=256",
}


def matmul(num_rows, inner, out, groups):
    return 2 * num_rows * inner * out, 2 * (num_rows * inner + groups * inner * out + num_rows * out), 0


def transposed(num_rows, inner, out, groups):
    return 2 * num_rows * inner * out, 2 * (num_rows * inner + num_rows * out + groups * inner * out), 0


def gathered(rows, width):  # a weight and an index of 4 bytes for each row
    return rows * width, rows * (2 * width + 8) + 2 * rows * width, 0


def reduced(tokens, slots, width):
    return 2 * tokens * slots * width, tokens * slots * (2 * width + 8) + 2 * tokens * width, 0


def dotted(rows, width, lanes=CHIP.sparse_core_lanes):  # a vector of partial sums leaves for each
    per_tile = 8 * 128 // lanes
    return 2 * rows * width, rows * (2 * 2 * width + 8) + -(-rows // per_tile) * TILE_BYTES, 0


EXPECTED = {
    ("grouped_matmul", "pallas_tpu"): [
        ("raggedmoe_grouped_matmul", matmul(512, 256, 384, 4)),
        ("raggedmoe_grouped_matmul", matmul(512, 384, 256, 4)),
        ("raggedmoe_grouped_matmul_transposed", transposed(512, 256, 384, 4)),
    ],
    ("expert_ffn", "pallas_tpu"): [
        ("expert_ffn", (3 * 2 * 512 * 256 * 384, 2 * (2 * 512 * 256 + 3 * 4 * 384 * 256), 512 * 384)),
    ],
    ("ragged_gather", "sparsecore"): [
        ("ragged_gather", gathered(128, 256)),
        ("ragged_gather_reduce", reduced(64, 2, 256)),
        ("ragged_row_dots", dotted(128, 256)),
    ],
    ("ragged_gather_reduce", "sparsecore"): [
        ("ragged_gather_reduce", reduced(64, 2, 256)),
        ("ragged_gather", gathered(128, 256)),
        ("ragged_row_dots", dotted(128, 256)),
    ],
}


@pytest.mark.parametrize(("name", "implementation"), OURS)
def test_every_kernel_claims_what_it_computes_and_moves(name, implementation):
    found = kernels_of(name, implementation)
    assert found
    assert all(figures is not None and figures[1] > 0 for _, figures in found)
    if (name, implementation) in EXPECTED:  # what is new has to claim something, at least
        assert sorted(found) == sorted(EXPECTED[name, implementation])


@pytest.mark.parametrize(
    ("gated", "activation", "groups", "passes", "transcendentals"),
    [(True, "silu", 2, 4, 512 * 128), (False, "relu2", 2, 4, 0), (True, "gelu", 1, 4, 512 * 128)],
)
def test_weights_are_read_once_for_each_tile_of_a_group_rows(gated, activation, groups, passes, transcendentals):
    """512 rows in tiles of 128, evenly divided: four tiles, whichever group they are of."""
    tiles = pallas_tpu.FfnTiles(rows=128, chunks=(128,), hidden=128, width=256, slots=2, pack=16, cores=1)
    rows = jax.ShapeDtypeStruct((512, 256), jnp.bfloat16)
    matrix = jax.ShapeDtypeStruct((groups, 128, 256), jnp.bfloat16)
    bounds = jax.ShapeDtypeStruct((groups + 1,), jnp.int32)

    def call(rows, matrix, bounds):
        weights = ExpertWeights(matrix, matrix if gated else None, matrix, None)
        return pallas_tpu_kernel.forward(
            rows, weights, bounds, activation=activation, tiles=tiles, vmem_limit=64 * 2**20
        )

    matrices = 3 if gated else 2
    (found,) = claims(traced(call, rows, matrix, bounds))
    moved = 2 * (2 * 512 * 256 + passes * matrices * 128 * 256)
    assert found == ("expert_ffn", (2 * matrices * 512 * 256 * 128, moved, transcendentals))
