"""Calls of attention for the tests of others' kernels behind our contract."""

import dataclasses
import functools

import jax

from raggedmoe import attention
from raggedmoe.kernels.attention.operands import Operands
from raggedmoe.kernels.catalog import operation
from raggedmoe.kernels.registry import record_selections

SPECS = {spec.name: spec for spec in operation("attention").specs}


def both_directions(module, example, **how):
    """The value and the gradients, by their names."""
    operands = Operands(*(example.arrays.get(field) for field in Operands._fields))
    scale = example.options["scale"] or operands.query.shape[3] ** -0.5
    static = {"scale": scale, "window": example.options["window"], **how}

    @jax.jit
    def both(operands, cotangent):
        out, logsumexp = module.forward(operands, **static)
        return out, *module.backward(operands, out, logsumexp, cotangent, **static)

    named = zip(("value", "dquery", "dkey", "dvalue", "dsinks"), both(operands, example.cotangent))
    return {name: array for name, array in named if array is not None}


def call_of(name, dtype="bfloat16", **changes):
    example = SPECS[name].example(dtype)
    with record_selections() as selections:
        jax.eval_shape(functools.partial(attention, **example.options), **example.arrays)
    return dataclasses.replace(selections[0].call, options={**selections[0].call.options, **changes})
