"""Quantised operands by hand, in float64: what every code means, and sums over what shares a scale.

It imports nothing of ours, and no library that knows these formats.
"""

import numpy as np


def _float_values(exponent_bits: int, mantissa_bits: int, bias: int) -> np.ndarray:
    """What each code of a format means by its formula, without infinities and NaN."""
    values = []
    for code in range(2 ** (1 + exponent_bits + mantissa_bits)):
        mantissa = code % 2**mantissa_bits
        exponent = (code >> mantissa_bits) % 2**exponent_bits
        sign = -1.0 if code >> (mantissa_bits + exponent_bits) else 1.0
        if exponent == 0:
            values.append(sign * mantissa * 2.0 ** (1 - bias - mantissa_bits))
        else:
            values.append(sign * (1 + mantissa / 2**mantissa_bits) * 2.0 ** (exponent - bias))
    return np.asarray(values)


E4M3 = _float_values(4, 3, 7)
E4M3[[0x7F, 0xFF]] = np.nan
E5M2 = _float_values(5, 2, 15)
E5M2[[0x7C, 0xFC]] = np.inf, -np.inf
E5M2[[0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF]] = np.nan
INT8 = np.concatenate([np.arange(128.0), np.arange(-128.0, 0.0)])
FP4 = _float_values(2, 1, 1)
VALUES = {"float8_e4m3fn": E4M3, "float8_e5m2": E5M2, "int8": INT8, "mxfp4": FP4}  # of every code
EXPONENTS = np.append(2.0 ** (np.arange(255) - 127.0), np.nan)  # of shared exponents


def values_of(codes: np.ndarray, qtype: str) -> np.ndarray:
    """What codes mean; those of mxfp4 are two in a byte, the lower half first."""
    if qtype == "mxfp4":
        codes = np.stack([codes % 16, codes // 16], axis=-1).reshape(*codes.shape[:-1], -1)
    return VALUES[qtype][codes]


def scales_of(scale: np.ndarray) -> np.ndarray:
    return EXPONENTS[scale] if scale.dtype == np.uint8 else scale.astype(np.float64)


def spread(scale: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """The scale of each element."""
    for dim, size in enumerate(shape):
        scale = np.repeat(scale, size // scale.shape[dim], axis=dim)
    return scale


def block_sums(array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Sums over what shares a scale."""
    for dim, num in enumerate(shape):
        first = np.arange(num) * (array.shape[dim] // num)
        array = np.add.reduceat(array, first, axis=dim)
    return array


def nearest_codes(array: np.ndarray, qtype: str) -> np.ndarray:
    """The code of the nearest finite value, of two as near the one whose last bit is zero; int8 without -128.

    What is larger than all is taken to the largest, and a zero keeps its sign where the format has one.
    """
    values = VALUES[qtype]
    codes = np.flatnonzero(
        np.isfinite(values) & ((values != -128) | (qtype != "int8")) & ~((values == 0) & np.signbit(values))
    )
    order = np.argsort(values[codes])
    codes, sorted_values = codes[order], values[codes][order]
    exact = np.asarray(array, np.float64)
    above = np.clip(np.searchsorted(sorted_values, exact), 1, len(codes) - 1)
    below = above - 1
    to_above, to_below = sorted_values[above] - exact, exact - sorted_values[below]
    tie_up = (codes[above] % 2 == 0) & (codes[below] % 2 != 0)
    return codes[np.where((to_above < to_below) | ((to_above == to_below) & tie_up), above, below)]
