"""fp8 in blocks and mxfp4, written by hand and decoded by plain loops."""

import json
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from raggedmoe import interop
from raggedmoe.kernels.dequantize import dequantize
from raggedmoe.kernels.qarray import QArray
from raggedmoe.models.generate import generate
from tests.interop.folders import (
    GOLDEN,
    SINGLE,
    bits,
    change_json,
    change_tensors,
    copied,
    header_and_data,
    quantised_in,
    stored,
    stored_quantised,
    write_checkpoint,
    write_raw,
)

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
DOWN = "model.layers.1.mlp.experts.5.down_proj.weight"


def fp8_value(byte):
    """E4M3 without infinities: sign, four bits of exponent with bias 7, three of mantissa."""
    sign, exponent, mantissa = -1 if byte & 0x80 else 1, (byte >> 3) & 0xF, byte & 7
    if exponent == 15 and mantissa == 7:
        return float("nan")
    return sign * (mantissa / 8 * 2**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


def fp4_value(nibble):
    """E2M1: sign, two bits of exponent with bias 1, one of mantissa."""
    sign, exponent, mantissa = -1 if nibble & 8 else 1, (nibble >> 1) & 3, nibble & 1
    return sign * (mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1))


FP8_VALUES = np.asarray([fp8_value(byte) for byte in range(256)], np.float32)


def fp8_matrix(stored_bytes, factors, block, dtype=ml_dtypes.bfloat16):
    rows, columns = stored_bytes.shape
    out = np.empty((rows, columns), np.float32)
    for i in range(rows):
        for first in range(0, columns, block[1]):
            part = slice(first, first + block[1])
            out[i, part] = FP8_VALUES[stored_bytes[i, part]] * factors[i // block[0], first // block[1]]
    return out.astype(dtype)


def mxfp4_rows(blocks, scales):
    """[rows, columns] of blocks [rows, columns / 32, 16] and scales [rows, columns / 32]."""
    rows = []
    for row_blocks, row_scales in zip(blocks.tolist(), scales.tolist()):
        row = []
        for packed, scale in zip(row_blocks, row_scales):
            for byte in packed:
                row += [fp4_value(byte & 15) * 2.0 ** (scale - 127), fp4_value(byte >> 4) * 2.0 ** (scale - 127)]
        rows.append(row)
    return np.asarray(rows, np.float32).astype(ml_dtypes.bfloat16)


def fp8_folder(folder, block, seed=0):
    """A golden V3 whose matrices, but for embedding, head and routers, are fp8; and what they mean, in bfloat16."""
    rng = np.random.default_rng(seed)
    config = json.loads((GOLDEN / "deepseek_v3" / "config.json").read_text())
    config["quantization_config"] = {**FP8, "weight_block_size": list(block)}
    tensors, meant = {}, {}
    for name, tensor in stored(GOLDEN / "deepseek_v3").items():
        if tensor.ndim != 2 or name.endswith(("embed_tokens.weight", "lm_head.weight", "mlp.gate.weight")):
            tensors[name] = meant[name] = tensor.astype(ml_dtypes.bfloat16)
            continue
        raw = rng.integers(0, 0x7F, tensor.shape, np.uint8) | (rng.integers(0, 2, tensor.shape, np.uint8) << 7)
        factors = rng.uniform(0.001, 0.1, [-(-n // size) for n, size in zip(tensor.shape, block)]).astype(np.float32)
        tensors[name], tensors[f"{name}_scale_inv"] = raw.view(ml_dtypes.float8_e4m3fn), factors
        meant[name] = fp8_matrix(raw, factors, block)
    bias = [name for name in tensors if name.endswith("e_score_correction_bias")]
    for name in bias:
        tensors[name] = meant[name] = stored(GOLDEN / "deepseek_v3")[name]
    return write_checkpoint(folder, config, tensors), config, meant, tensors


# 128 is wider than every matrix of this model, whose sizes are no multiples of 16 either.
@pytest.mark.parametrize("block", [(128, 128), (16, 16), (9, 7)])
def test_fp8_weights_are_those_of_a_plain_loop(block, tmp_path):
    folder, config, meant, _ = fp8_folder(tmp_path / "fp8", block)
    del config["quantization_config"]
    loaded = interop.load(folder)
    expected = interop.load(write_checkpoint(tmp_path / "plain", config, meant))
    assert loaded.config == expected.config
    assert loaded.config.param_dtype == jnp.bfloat16
    for name, array in expected.params.items():
        np.testing.assert_array_equal(bits(loaded.params[name]), bits(array), err_msg=name)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_fp8_weights_are_rounded_once_to_the_type_that_is_asked_for(dtype, tmp_path):
    """To float32 not at all: it has 24 bits of a value with 4 times a factor, and not the 8 of bfloat16."""
    block = (9, 7)
    folder, config, meant, tensors = fp8_folder(tmp_path / "fp8", block)
    del config["quantization_config"]
    for name in meant:
        if f"{name}_scale_inv" in tensors:
            raw, factors = tensors[name].view(np.uint8), tensors[f"{name}_scale_inv"]
            meant[name] = fp8_matrix(raw, factors, block, np.dtype(dtype))
    expected = interop.load(write_checkpoint(tmp_path / "plain", config, meant), param_dtype=dtype).params
    matrix = np.asarray(expected["stacks.1.0.moe.wo"])
    assert (matrix.astype(ml_dtypes.bfloat16).astype(dtype) != matrix).any()
    for name, array in interop.load(folder, param_dtype=dtype).params.items():
        np.testing.assert_array_equal(bits(array), bits(expected[name]), err_msg=name)


def test_fp8_factors_may_be_bfloat16(tmp_path):
    """As Qwen3's are. Powers of two are the same in both types, so the weights must be too."""
    _, config, _, tensors = fp8_folder(tmp_path / "wide", (16, 16))
    factors = {name: np.exp2(np.round(np.log2(t))) for name, t in tensors.items() if name.endswith("_scale_inv")}
    narrow = {name: factor.astype(ml_dtypes.bfloat16) for name, factor in factors.items()}
    wide = write_checkpoint(tmp_path / "powers", config, {**tensors, **factors})
    loaded = interop.load(write_checkpoint(tmp_path / "narrow", config, {**tensors, **narrow})).params
    for name, array in interop.load(wide).params.items():
        np.testing.assert_array_equal(bits(loaded[name]), bits(array), err_msg=name)


def e8m0_folder(folder, block):
    """The fp8 checkpoint with scales of exponents alone, each file's bytes by hand; and what its matrices mean."""
    _, config, meant, tensors = fp8_folder(folder / "any", block)
    config["quantization_config"]["scale_fmt"] = "ue8m0"
    rng = np.random.default_rng(1)
    header, data = {}, b""
    for name, tensor in tensors.items():
        if name.endswith("_scale_inv"):
            weight = name.removesuffix("_scale_inv")
            codes = rng.integers(110, 125, tensor.shape, np.uint8)
            factors = np.asarray([[2.0 ** (int(code) - 127) for code in row] for row in codes], np.float32)
            meant[weight] = fp8_matrix(tensors[weight].view(np.uint8), factors, block)
            tensor, dtype = codes, "F8_E8M0"
        else:
            dtype = {"bfloat16": "BF16", "float32": "F32", "float8_e4m3fn": "F8_E4M3"}[tensor.dtype.name]
        raw = np.ascontiguousarray(tensor).tobytes()
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    (folder / "e8m0").mkdir()
    (folder / "e8m0" / "config.json").write_text(json.dumps(config))
    write_raw(folder / "e8m0" / SINGLE, json.dumps(header).encode(), data)
    del config["quantization_config"]
    return folder / "e8m0", write_checkpoint(folder / "plain", config, meant)


# Of blocks of 9 × 7 the last ones are cut, and so are those that heads begin in.
@pytest.mark.parametrize("block", [(128, 128), (16, 16), (9, 7)])
def test_fp8_factors_may_be_exponents_alone(block, tmp_path):
    """As newer DeepSeek checkpoints have them (ue8m0). Kept, they are a byte each; written, they are the same bytes."""
    folder, plain = e8m0_folder(tmp_path, block)
    loaded, kept, expected = interop.load(folder), interop.load(folder, keep_quantised=True), interop.load(plain)
    quantised = quantised_in(expected.params, "fp8")
    for name, array in expected.params.items():
        np.testing.assert_array_equal(bits(loaded.params[name]), bits(array), err_msg=name)
        held = kept.params[name]
        assert isinstance(held, QArray) == (name in quantised)
        if name in quantised:
            assert held.scale.dtype == np.uint8
            held = jax.jit(lambda stored: dequantize(stored, jnp.float32))(held).astype(jnp.bfloat16)
        np.testing.assert_array_equal(bits(held), bits(array), err_msg=name)
    interop.save(kept, tmp_path / "again")
    before, after = (stored_quantised(where) for where in (folder, tmp_path / "again"))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert after[name].dtype == tensor.dtype, name
        np.testing.assert_array_equal(bits(after[name]), bits(tensor), err_msg=name)
    prompts = [[5, 9, 2, 17], [3, 1]]
    texts = [list(generate(model, prompts, max_new_tokens=12)) for model in (kept, loaded)]
    assert texts[0] == texts[1]


def test_an_exponent_that_is_no_number_makes_its_block_none(tmp_path):
    folder, _ = e8m0_folder(tmp_path, (16, 16))
    header, data = header_and_data(folder / SINGLE)
    start = header[f"{DOWN}_scale_inv"]["data_offsets"][0]
    write_raw(folder / SINGLE, json.dumps(header).encode(), data[:start] + b"\xff" + data[start + 1 :])
    down = np.asarray(interop.load(folder).params["stacks.1.0.moe.wo"][0, 5], np.float32)  # [F D], stored [D F]
    assert np.isnan(down[:16, :16]).all()
    assert np.isfinite(down[16:]).all()
    assert np.isfinite(down[:, 16:]).all()


def test_pieces_that_do_not_end_at_a_block_give_the_same_weights(tmp_path, monkeypatch):
    folder, _, _, _ = fp8_folder(tmp_path / "fp8", (16, 16))
    whole = interop.load(folder)
    monkeypatch.setattr(sys.modules["raggedmoe.interop.load"], "PIECE_BYTES", 700)
    pieces = interop.load(folder)
    for name, array in whole.params.items():
        np.testing.assert_array_equal(bits(pieces.params[name]), bits(array), err_msg=name)


def test_every_byte_of_fp8_is_decoded_as_a_plain_loop_does():
    every = np.arange(256, dtype=np.uint8)
    ours = every.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    np.testing.assert_array_equal(ours, np.asarray([fp8_value(byte) for byte in range(256)], np.float32))


@pytest.fixture
def refused(tmp_path):
    """The message of the error for the fp8 checkpoint with some tensors and settings changed; None removes a tensor."""

    def load(tensors, **settings):
        folder, config, _, whole = fp8_folder(tmp_path / "fp8", (16, 16))
        config["quantization_config"].update(settings)
        changed = {name: tensor for name, tensor in {**whole, **tensors}.items() if tensor is not None}
        with pytest.raises(ValueError) as raised:
            interop.load(write_checkpoint(folder, config, changed))
        return str(raised.value)

    return load


def test_fp8_without_its_factors_is_refused_by_name(refused):
    message = refused({f"{DOWN}_scale_inv": None})
    assert f"{SINGLE}: {DOWN} is quantised; expected its factors {DOWN}_scale_inv" in message


def test_fp8_factors_of_a_wrong_shape_are_refused_with_expected_and_found(refused):
    message = refused({f"{DOWN}_scale_inv": np.ones((1, 2), np.float32)})
    expected = "float32 or bfloat16 or float16 or float8_e8m0fnu[2, 2]"
    assert f"{SINGLE}: {DOWN}_scale_inv: expected {expected}, found float32[1, 2]" in message


def test_factors_of_a_tensor_that_is_not_there_are_unknown(refused):
    message = refused({"ghost_scale_inv": np.ones((1, 1), np.float32)})
    assert "unknown (1)" in message
    assert "ghost_scale_inv" in message


@pytest.mark.parametrize("shape", [(32,), (2, 16, 32)])
def test_fp8_in_anything_but_a_matrix_is_refused(shape, refused):
    factors = np.ones([-(-n // 16) for n in shape[:2]], np.float32)
    values = np.zeros(shape, np.uint8).view(ml_dtypes.float8_e4m3fn)
    message = refused({"model.norm.weight": values, "model.norm.weight_scale_inv": factors})
    assert f"{SINGLE}: model.norm.weight: expected fp8 in matrices only, found {list(shape)}" in message


def test_fp8_without_a_quantization_config_is_refused_as_a_wrong_type(tmp_path):
    folder, _, _, _ = fp8_folder(tmp_path / "fp8", (16, 16))
    change_json(folder / "config.json", lambda config: config.pop("quantization_config"))
    with pytest.raises(ValueError, match="expected a float, found float8_e4m3fn"):
        interop.load(folder)


@pytest.mark.parametrize("block", [None, 128, [128], [0, 128], ["a", "b"]])
def test_fp8_without_blocks_is_refused(block, refused):
    assert "config.json: expected fp8 weights in blocks" in refused({}, weight_block_size=block)


def mxfp4_folder(folder, seed=0):
    """A gpt-oss of expert width 64 and model width 32 whose experts are in 4 bits; and what they mean."""
    rng = np.random.default_rng(seed)
    config = json.loads((GOLDEN / "gpt_oss" / "config.json").read_text())
    config["intermediate_size"] = 64
    tensors = {name: tensor.astype(ml_dtypes.bfloat16) for name, tensor in stored(GOLDEN / "gpt_oss").items()}
    meant = {}
    for name in [name for name in tensors if name.endswith("experts.gate_up_proj_bias")]:
        tensors[name] = meant[name] = rng.standard_normal((8, 128)).astype(ml_dtypes.bfloat16)
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        outputs, inputs = (128, 32) if "gate_up" in name else (32, 64)
        blocks = rng.integers(0, 256, (8, outputs, inputs // 32, 16), np.uint8)
        scales = rng.integers(110, 130, (8, outputs, inputs // 32), np.uint8)
        del tensors[name]
        tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = blocks, scales
        # The parameter is stored inputs first.
        meant[name] = np.stack([mxfp4_rows(*expert).T for expert in zip(blocks, scales)])
    plain = {**{n: t for n, t in tensors.items() if not n.endswith(("_blocks", "_scales"))}, **meant}
    quantized = {**config, "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}}
    return write_checkpoint(folder, quantized, tensors), config, plain


def test_mxfp4_weights_are_those_of_a_plain_loop(tmp_path):
    folder, config, meant = mxfp4_folder(tmp_path / "mxfp4")
    loaded = interop.load(folder)
    expected = interop.load(write_checkpoint(tmp_path / "plain", config, meant))
    assert loaded.config == expected.config
    assert loaded.config.param_dtype == jnp.bfloat16
    for name, array in expected.params.items():
        np.testing.assert_array_equal(bits(loaded.params[name]), bits(array), err_msg=name)


BLOCKS = "model.layers.0.mlp.experts.down_proj_blocks"
SCALES = "model.layers.0.mlp.experts.down_proj_scales"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({SCALES: None}, SCALES),
        ({SCALES: np.zeros((8, 32, 3), np.uint8)}, f"{SCALES}: expected uint8[8, 32, 2], found uint8[8, 32, 3]"),
        ({SCALES: np.zeros((8, 32, 2), np.float32)}, f"{SCALES}: expected uint8[8, 32, 2], found float32[8, 32, 2]"),
        ({BLOCKS: np.zeros((8, 32, 2, 8), np.uint8)}, f"{BLOCKS}: expected uint8 [..., blocks, 16]"),
        ({BLOCKS: np.zeros((8, 32, 2, 16), np.int8)}, f"{BLOCKS}: expected uint8 [..., blocks, 16]"),
        ({BLOCKS: None}, BLOCKS),
    ],
)
def test_broken_mxfp4_is_refused_by_name(changes, named, tmp_path):
    folder, _, _ = mxfp4_folder(tmp_path / "mxfp4")

    def change(tensors):
        tensors.update(changes)
        for name in [name for name, value in changes.items() if value is None]:
            del tensors[name]

    change_tensors(folder, change)
    with pytest.raises(ValueError) as raised:
        interop.load(folder)
    assert named in str(raised.value)


def test_a_quantized_checkpoint_is_exported_in_bfloat16(tmp_path):
    folder, _, meant = mxfp4_folder(tmp_path / "mxfp4")
    interop.save(interop.load(folder), tmp_path / "out")
    found = stored(tmp_path / "out")
    assert found.keys() == meant.keys()
    for name, values in meant.items():
        np.testing.assert_array_equal(bits(found[name]), bits(values), err_msg=name)
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())


def test_mxfp4_is_not_a_layout_that_can_be_written(golden_model, tmp_path):
    with pytest.raises(ValueError, match="expected one of fused"):
        interop.save(golden_model("gpt_oss"), tmp_path / "out", layout="mxfp4")


def test_a_folder_that_was_not_quantized_is_read_as_it_is(tmp_path, golden_model):
    folder = copied("gpt_oss", tmp_path / "plain")
    change_json(folder / "config.json", lambda config: config.update(quantization_config=None))
    assert interop.load(folder).config == golden_model("gpt_oss").config
