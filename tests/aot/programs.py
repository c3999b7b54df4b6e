"""Subjects that the tests have a worker compile."""

import os
import time
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from raggedmoe.aot.case import JitProgram

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
