"""Subjects that the tests have a worker compile."""

import os
import time
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from raggedmoe.aot.case import JitProgram
from raggedmoe.kernels.grouped_matmul.quantized_matmuls import quantized_matmuls
from raggedmoe.kernels.quant_config import QUANTIZATIONS

ROWS = jax.ShapeDtypeStruct((256, 256), jnp.bfloat16)


@dataclass(frozen=True)
class Matmul:
    def program(self):
        return JitProgram(function=lambda x: x @ x, args=(ROWS,))


@dataclass(frozen=True)
class Abort:
    def program(self):
        os.abort()


@dataclass(frozen=True)
class Sleep:
    def program(self):
        time.sleep(600)


@dataclass(frozen=True)
class Broken:
    def program(self):
        raise TypeError("a kernel that cannot be traced")


@dataclass(frozen=True)
class TooLarge:
    def program(self):
        side = jax.ShapeDtypeStruct((2**17, 2**17), jnp.bfloat16)
        return JitProgram(function=lambda x: x @ (x @ x).T, args=(side,))


@dataclass(frozen=True)
class QuantizedTraining:
    """A matmul that quantises its operands, with both gradients, by our TensorCore kernels."""

    quantization: str

    def program(self):
        def function(rows, weight, group_sizes, cotangent):
            options = {"config": QUANTIZATIONS[self.quantization], "transpose_rhs": True}

            def products(rows, weight):
                return quantized_matmuls(rows, (weight,), group_sizes, implementation="pallas_tpu", **options)

            value, vjp = jax.vjp(products, rows, weight)
            return value, vjp((cotangent,))

        rows, weight, cotangent = (
            jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((1024, 512), (4, 256, 512), (1024, 256))
        )
        sizes = jax.ShapeDtypeStruct((4,), jnp.int32)
        return JitProgram(function=function, args=(rows, weight, sizes, cotangent))
