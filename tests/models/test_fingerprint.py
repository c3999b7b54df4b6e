"""Fingerprints of weights: what they tell apart, and what they know again, held against checksums by NumPy."""

import dataclasses
import hashlib

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from raggedmoe.kernels.qarray import QArray
from raggedmoe.models.fingerprint import fingerprint, is_fingerprint_of
from tests.models.drawn import tiny

CONFIG = tiny("mixtral-tiny", num_layers=1)
EXPERTS = "stacks.0.0.moe.wi_0"
TYPES = {"bfloat16": ml_dtypes.bfloat16, "float32": np.float32, "float16": np.float16}


def typed(dtype):
    return dataclasses.replace(CONFIG, param_dtype=jnp.dtype(dtype))


def drawn():
    rng = np.random.default_rng(0)
    shapes = {"embedding": (256, 64), "final_norm": (64,), EXPERTS: (1, 8, 96, 64)}
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def cast(params, dtype):
    return {name: jnp.asarray(value.astype(TYPES[dtype])) for name, value in params.items()}


def numpy_digest(params, dtype):
    """The checksum of values in a type: their bits, each times an odd number of its own."""
    digest = hashlib.sha256()
    for name in sorted(params):
        values = np.asarray(params[name]).astype(TYPES[dtype])
        bits = values.reshape(-1).view({2: np.uint16, 4: np.uint32}[values.dtype.itemsize]).astype(np.uint64)
        total = int(((bits + 1) * (2 * np.arange(bits.size, dtype=np.uint64) + 1) % 2**32).sum() % 2**32)
        digest.update(f"{name} {values.shape} {dtype} {total}\n".encode())
    return digest.hexdigest()[:16]


def test_a_fingerprint_has_the_type_of_the_weights_and_a_narrow_one():
    params = drawn()
    narrow = numpy_digest(params, "bfloat16")
    assert fingerprint(cast(params, "float32"), typed("float32")) == (
        f"float32:{numpy_digest(params, 'float32')} bfloat16:{narrow}"
    )
    assert fingerprint(cast(params, "bfloat16"), typed("bfloat16")) == f"bfloat16:{narrow}"


def test_a_fingerprint_tells_places_names_and_single_bits():
    """And it is the same for the parts of a mesh."""
    params = cast(drawn(), "float32")
    table = params["embedding"]
    others = [
        {**params, "embedding": table.at[0].set(table[1]).at[1].set(table[0])},
        {**params, "final_norm": params["final_norm"].at[7].add(2.0**-20)},
        {**params, "embedding": table[:, :32]},
        {"head" if name == "embedding" else name: value for name, value in params.items()},
    ]
    config = dataclasses.replace(typed("float32"), tied_embeddings=False)
    written = fingerprint(params, config)
    assert len({written, *(fingerprint(each, config) for each in others)}) == 5
    assert not any(is_fingerprint_of(written, each, config) for each in others)
    places = NamedSharding(jax.make_mesh((4,), ("x",)), PartitionSpec())
    split = NamedSharding(places.mesh, PartitionSpec("x"))
    on_mesh = {name: jax.device_put(value, places if value.ndim == 4 else split) for name, value in params.items()}
    assert is_fingerprint_of(written, on_mesh, config)
    assert fingerprint(on_mesh, config) == written


@pytest.mark.parametrize("stored", ["bfloat16", "float32", "float16"])
def test_weights_are_known_again_in_whatever_type_they_are_loaded(stored):
    held = {name: value.astype(TYPES[stored]).astype(np.float32) for name, value in drawn().items()}
    changed = {**held, "final_norm": held["final_norm"] * 1.01}
    for before in ("float32", "bfloat16", "float16"):
        written = fingerprint(cast(held, before), typed(before))
        for now in ("float32", "bfloat16"):
            known = is_fingerprint_of(written, cast(held, now), typed(now))
            # What was rounded to one of the 16-bit types says nothing of what is rounded to the other.
            assert known == ((before, now) != ("float16", "bfloat16")), (before, now)
            assert not is_fingerprint_of(written, cast(changed, now), typed(now)), (before, now)


def test_one_bit_that_only_the_wider_type_has_is_told():
    params = drawn()
    changed = {**params, "final_norm": np.nextafter(params["final_norm"], np.float32(9))}
    written = fingerprint(cast(params, "float32"), typed("float32"))
    assert not is_fingerprint_of(written, cast(changed, "float32"), typed("float32"))


@pytest.mark.parametrize("qtype", ["float8_e4m3fn", "int8", "mxfp4"])
def test_quantised_experts_count_as_what_they_stand_for(qtype):
    rng = np.random.default_rng(1)
    shape, params = (1, 8, 96, 64), drawn()
    if qtype == "mxfp4":
        codes = rng.integers(0, 256, (1, 8, 96, 32), np.uint8)
        exponents = rng.integers(120, 130, (1, 8, 96, 2), np.uint8)
        table = np.asarray([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
        table = np.concatenate([table, -table])
        values = np.stack([table[codes & 15], table[codes >> 4]], -1).reshape(shape)
        meant, scale = values * np.exp2(exponents.astype(np.float32) - 127).repeat(32, -1), exponents
    else:
        scale = rng.uniform(0.001, 0.1, (1, 8, 6, 4)).astype(np.float32)
        values = rng.integers(-100, 100, shape).astype(np.int8 if qtype == "int8" else ml_dtypes.float8_e4m3fn)
        meant = values.astype(np.float32) * scale.repeat(16, -2).repeat(16, -1)
        codes = values if qtype == "int8" else values.view(np.uint8)
    params[EXPERTS] = meant
    kept = QArray(jnp.asarray(codes), jnp.asarray(scale), None, qtype)
    for dtype in ("float32", "bfloat16"):
        whole = cast(params, dtype)
        assert fingerprint({**whole, EXPERTS: kept}, typed(dtype)) == fingerprint(whole, typed(dtype))
    other = QArray(jnp.asarray(codes).at[0, 3, 5, 7].add(1), jnp.asarray(scale), None, qtype)
    written = fingerprint(cast(params, "float32"), typed("float32"))
    assert not is_fingerprint_of(written, {**cast(params, "float32"), EXPERTS: other}, typed("float32"))


@pytest.mark.parametrize("before", ["float32", "bfloat16"])
def test_a_fingerprint_of_an_older_version_has_no_type(before):
    held = {name: value.astype(ml_dtypes.bfloat16).astype(np.float32) for name, value in drawn().items()}
    written = numpy_digest(held, before)
    for now in ("float32", "bfloat16"):
        assert is_fingerprint_of(written, cast(held, now), typed(now))
        changed = {**held, "embedding": held["embedding"][::-1]}
        assert not is_fingerprint_of(written, cast(changed, now), typed(now))


def test_an_older_version_rounded_what_was_quantised_to_bfloat16_first():
    params = drawn()
    rounded = {name: value.astype(ml_dtypes.bfloat16).astype(np.float32) for name, value in params.items()}
    assert is_fingerprint_of(numpy_digest(rounded, "float32"), cast(params, "float32"), typed("float32"))
