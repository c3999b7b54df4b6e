"""Programs that the tests have a worker make."""

import os
import time

import jax
import jax.numpy as jnp

from raggedmoe.aot.case import Program

ROWS = jax.ShapeDtypeStruct((256, 256), jnp.bfloat16)


def matmul():
    return Program(function=lambda x: x @ x, args=(ROWS,))


def abort():
    os.abort()


def sleep():
    time.sleep(600)


def broken():
    raise TypeError("a kernel that cannot be traced")


def too_large():
    side = jax.ShapeDtypeStruct((2**17, 2**17), jnp.bfloat16)
    return Program(function=lambda x: x @ (x @ x).T, args=(side,))
