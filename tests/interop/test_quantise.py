"""`interop.quantise`: values and scales by the formats' definitions, and what our and others' readers make of them."""

import json
import logging
import shutil
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from raggedmoe import interop
from raggedmoe.interop.quantise import ERRORS
from raggedmoe.kernels.dequantize import dequantize
from raggedmoe.kernels.qarray import QArray
from tests.interop.folders import (
    GOLDEN,
    SINGLE,
    bits,
    change_tensors,
    copied,
    quantised_in,
    stored,
    stored_quantised,
    write_checkpoint,
)
from tests.interop.test_quantized import FP8_VALUES

UNQUANTISED = ("embed_tokens.weight", "head.weight", "gate.weight", "eh_proj.weight")
DOWN = "model.layers.0.block_sparse_moe.experts.3.w2.weight"
FINITE = np.unique(FP8_VALUES[np.isfinite(FP8_VALUES)]).astype(np.float64)


def matrices_of(tensors):
    return {name for name, tensor in tensors.items() if tensor.ndim == 2 and not name.endswith(UNQUANTISED)}


def write_wide(folder, width, hidden, heads=4, dtype=ml_dtypes.bfloat16):
    """A Mixtral of one layer of those widths, with zeros and large values in blocks of one matrix."""
    config = json.loads((GOLDEN / "mixtral" / "config.json").read_text())
    config |= {"hidden_size": width, "intermediate_size": hidden, "head_dim": 8, "num_hidden_layers": 1}
    config["num_attention_heads"] = heads
    rng = np.random.default_rng(0)
    tensors = {}
    for name, tensor in stored(GOLDEN / "mixtral").items():
        if "layers.1." not in name:
            queries, keys = (8 * heads, width), (16, width)
            attention = {"q_proj": queries, "k_proj": keys, "v_proj": keys, "o_proj": queries[::-1]}
            shape = next((attention[key] for key in attention if key in name), None)
            shape = shape or [{32: width, 24: hidden}.get(size, size) for size in tensor.shape]
            tensors[name] = (0.1 * rng.standard_normal(shape)).astype(dtype)
    tensors[DOWN][:128, 128:] = 0
    tensors[DOWN][128:, :] *= 1000
    tensors[DOWN][7] = 0
    return write_checkpoint(folder, config, tensors)


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A folder for each format: of several blocks of 128, and of rows that are no multiple of 4."""
    folder = tmp_path_factory.mktemp("wide")
    return {"fp8": write_wide(folder / "fp8", 256, 384), "int8": write_wide(folder / "int8", 136, 150)}


@pytest.fixture(scope="module", params=["fp8", "int8"])
def written(request, wide, tmp_path_factory):
    """The format, the folder, and the error that was reported of each matrix."""
    out = tmp_path_factory.mktemp("out") / request.param
    return (
        request.param,
        out,
        {error.name: error for error in interop.quantise(wide[request.param], out, request.param)},
    )


def unpacked(words, columns):
    """Int8 by its definition: eight bits of a word, the lowest first, 128 more than the value."""
    return np.stack([((words[:, i // 4] >> (8 * (i % 4))) & 0xFF) - 128 for i in range(columns)], axis=1)


def parts_of(to, tensors, name, shape):
    """Values and the scale of each, in float64."""
    if to == "fp8":
        scale = tensors[f"{name}_scale_inv"].repeat(128, axis=0).repeat(128, axis=1)[: shape[0], : shape[1]]
        return FP8_VALUES[tensors[name].view(np.uint8)].astype(np.float64), scale.astype(np.float64)
    assert tensors[f"{name}_shape"].tolist() == list(shape)
    scale = tensors[f"{name}_scale"].astype(np.float64).repeat(shape[1], axis=1)
    return unpacked(tensors[f"{name}_packed"], shape[1]).astype(np.float64), scale


def half_step(to, ratio):
    """Half the distance of the two values around a ratio: the largest error of rounding."""
    if to == "int8":
        return 0.5
    above = np.clip(np.searchsorted(FINITE, ratio), 1, len(FINITE) - 1)
    return (FINITE[above] - FINITE[above - 1]) / 2


def test_values_are_the_nearest_and_scales_those_of_the_largest(written, wide):
    to, out, errors = written
    before, after = stored(wide[to]), stored_quantised(out)
    assert errors.keys() == matrices_of(before)
    largest_value = {"fp8": 448, "int8": 127}[to]
    for name, error in errors.items():
        weights = before[name].astype(np.float64)
        values, scale = parts_of(to, after, name, weights.shape)
        block = (128, 128) if to == "fp8" else (1, weights.shape[1])
        for i in range(0, weights.shape[0], block[0]):
            for j in range(0, weights.shape[1], block[1]):
                part = (slice(i, i + block[0]), slice(j, j + block[1]))
                largest = np.abs(weights[part]).max()
                expected = largest / largest_value if largest else 1
                # Of fp8 two roundings, of a reciprocal and a product; of int8 one to bfloat16.
                assert abs(scale[i, j] - expected) <= (2 * 2**-24 if to == "fp8" else 2**-8) * expected
        limited = np.clip(weights / scale, -largest_value, largest_value)
        assert np.abs(values).max() <= largest_value
        assert (np.abs(values - limited) <= half_step(to, limited) * (1 + 1e-5)).all()
        difference = values * scale - weights
        relative = np.sqrt(np.square(difference).sum() / np.square(weights).sum())
        assert error.relative == pytest.approx(relative, rel=1e-5)
        assert error.largest == pytest.approx(np.abs(difference).max() / np.abs(weights).max(), rel=1e-5)
        assert (error.bytes_before, error.shape) == (before[name].nbytes, before[name].shape)
        assert error.bytes_after == sum(tensor.nbytes for key, tensor in after.items() if key.startswith(name))
    # A format with three bits of mantissa is at most 2⁻⁴ off, and of even ratios 2⁻⁴/√12 or more in the mean.
    low, high = {"fp8": (0.015, 0.04), "int8": (0.002, 0.015)}[to]
    assert all(low < error.relative < high for name, error in errors.items() if name != DOWN)


def test_all_else_is_as_it_was(written, wide):
    to, out, errors = written
    before, after = stored(wide[to]), stored_quantised(out)
    others = before.keys() - errors.keys()
    assert {name for name in after if not name.startswith(tuple(errors))} == others
    for name in others:
        np.testing.assert_array_equal(bits(after[name]), bits(before[name]), err_msg=name)
    assert json.loads((out / ERRORS).read_text())["tensors"][0]["name"] in errors
    config = json.loads((out / "config.json").read_text())
    assert config.pop("quantization_config")
    assert config == json.loads((wide[to] / "config.json").read_text())


def test_it_is_read_as_it_was_written_whole_or_kept(written, wide):
    to, out, _ = written
    loaded, kept, plain = interop.load(out), interop.load(out, keep_quantised=True), interop.load(wide[to])
    tensors, before = stored_quantised(out), stored(wide[to])
    assert loaded.config == kept.config == plain.config
    quantised = {name for name, array in kept.params.items() if isinstance(array, QArray)}
    assert quantised == quantised_in(plain.params, to)
    for name, array in loaded.params.items():
        found = kept.params[name]
        if name in quantised:
            assert found.qvalue.nbytes == array.size
            found = jax.jit(lambda operand: dequantize(operand, jnp.float32))(found).astype(jnp.bfloat16)
        np.testing.assert_array_equal(bits(found), bits(array), err_msg=name)
    exact = interop.load(out, param_dtype="float32").params
    for expert in range(8):
        for matrix, param in (("w1", "wi_0"), ("w3", "wi_1"), ("w2", "wo")):
            name = f"model.layers.0.block_sparse_moe.experts.{expert}.{matrix}.weight"
            values, scale = parts_of(to, tensors, name, before[name].shape)
            meant = (values * scale).astype(np.float32)
            meant = meant.T if matrix == "w2" else meant
            for params, expected in ((exact, meant), (loaded.params, meant.astype(ml_dtypes.bfloat16))):
                found = np.asarray(params[f"stacks.0.0.moe.{param}"])[0, expert]
                np.testing.assert_array_equal(bits(found), bits(expected), err_msg=name)


@pytest.mark.parametrize("to", ["fp8", "int8"])
def test_a_head_that_is_the_embedding_is_named_among_what_is_not_quantised(to, tmp_path):
    """It has no tensor, but is a linear layer to those who would make one of 8 bits of it."""
    interop.quantise(GOLDEN / "qwen3_moe_tied", tmp_path / "out", to)
    assert not any("lm_head" in name for name in stored_quantised(tmp_path / "out"))
    settings = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    named = settings["modules_to_not_convert" if to == "fp8" else "ignore"]
    assert named.count("lm_head") == 1
    assert interop.load(tmp_path / "out").config.tied_embeddings


@pytest.mark.parametrize("to", ["fp8", "int8"])
def test_pieces_are_those_of_the_whole(to, wide, tmp_path, monkeypatch):
    interop.quantise(wide[to], tmp_path / "whole", to)
    monkeypatch.setattr(sys.modules["raggedmoe.interop.quantise"], "PIECE_BYTES", 10_000)
    interop.quantise(wide[to], tmp_path / "pieces", to)
    whole, pieces = stored_quantised(tmp_path / "whole"), stored_quantised(tmp_path / "pieces")
    assert whole.keys() == pieces.keys()
    for name, tensor in whole.items():
        np.testing.assert_array_equal(bits(pieces[name]), bits(tensor), err_msg=name)


def test_experts_that_are_stored_together_are_written_one_by_one(tmp_path):
    interop.quantise(GOLDEN / "qwen3_moe_fused", tmp_path / "out", "fp8")
    apart = {**interop.load(GOLDEN / "qwen3_moe_fused").params}
    for name, array in interop.load(tmp_path / "out", param_dtype="float32").params.items():
        exact = np.asarray(apart[name], np.float64)
        largest = np.abs(exact).max()
        assert np.abs(np.asarray(array, np.float64) - exact).max() <= (2**-4 + 2**-8) * largest, name
    names = stored_quantised(tmp_path / "out")
    assert any(name.endswith("mlp.experts.7.gate_proj.weight_scale_inv") for name in names)
    assert not any(name.endswith("gate_up_proj") for name in names)


def test_modules_of_multi_token_prediction_are_quantised_but_for_what_joins_them(tmp_path):
    interop.quantise(GOLDEN / "deepseek_v3_mtp", tmp_path / "out", "fp8")
    before, after = stored(GOLDEN / "deepseek_v3_mtp"), stored_quantised(tmp_path / "out")
    assert {name for name in before if f"{name}_scale_inv" in after} == matrices_of(before)
    kept, exact = (interop.load(tmp_path / "out", keep_quantised=keep, param_dtype="float32") for keep in (True, False))
    assert isinstance(kept.params["mtp.0.moe.wo"], QArray)
    ids = jnp.asarray([[5, 9, 2, 17, 3, 1]])
    (found,), (expected,) = kept.mtp_logits(ids), exact.mtp_logits(ids)
    np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max())


def test_a_matrix_whose_last_block_would_be_cut_stays(tmp_path):
    """144 rows of queries."""
    folder = write_wide(tmp_path / "plain", 128, 128, heads=18)
    interop.quantise(folder, tmp_path / "out", "fp8")
    before, after = stored(folder), stored_quantised(tmp_path / "out")
    names = [f"model.layers.0.self_attn.{name}_proj" for name in "qo"]
    for name in names:
        np.testing.assert_array_equal(bits(after[f"{name}.weight"]), bits(before[f"{name}.weight"]))
    settings = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert set(names) <= set(settings["modules_to_not_convert"])
    assert "model.layers.0.self_attn.k_proj.weight_scale_inv" in after


def test_the_tokenizer_and_licence_go_along(tmp_path):
    folder = copied("mixtral", tmp_path / "plain")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "LICENSE").write_text("free")
    interop.quantise(folder, tmp_path / "out", "int8")
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    assert (tmp_path / "out" / "LICENSE").read_text() == "free"


def test_what_cannot_be_quantised_is_refused_and_nothing_is_written(wide, tmp_path):
    def refused(folder, to="fp8"):
        with pytest.raises(ValueError) as raised:
            interop.quantise(folder, tmp_path / "refused", to)
        assert not (tmp_path / "refused").exists()
        return str(raised.value)

    assert "'fp4': expected one of fp8, int8" in refused(wide["fp8"], "fp4")
    assert "got gpt_oss, whose experts have biases" in refused(GOLDEN / "gpt_oss")
    interop.quantise(wide["fp8"], tmp_path / "fp8", "fp8")
    assert "found a quantization_config" in refused(tmp_path / "fp8", "int8")
    assert "experts.0.w1.weight [150, 136], whose last block" in refused(wide["int8"])
    interop.save_native(interop.load(GOLDEN / "olmoe"), tmp_path / "native")
    assert "raggedmoe export" in refused(tmp_path / "native")
    folder = shutil.copytree(wide["fp8"], tmp_path / "broken")
    change_tensors(folder, lambda tensors: tensors[DOWN].__setitem__((3, 1), np.inf))
    assert f"{SINGLE}: {DOWN}: expected finite weights" in refused(folder)


@pytest.mark.ci
@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
@pytest.mark.parametrize("to", ["fp8", "int8"])
@pytest.mark.parametrize(
    "family",
    [
        "deepseek_v3",
        "wide",
        *(pytest.param(f, marks=pytest.mark.slow) for f in ("mixtral", "deepseek_v2_lite", "qwen3_moe", "olmoe")),
    ],
)
def test_transformers_reads_the_same_weights(family, to, tmp_path):
    """Its fp8 needs accelerate, its int8 the compressed-tensors package; both make arrays of them on a CPU."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    pytest.importorskip("accelerate" if to == "fp8" else "compressed_tensors")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    out = tmp_path / "out"
    folder = GOLDEN / family
    if family == "wide":
        folder = write_wide(tmp_path / "wide", 256, 384, heads=18, dtype=np.float32)
    interop.quantise(folder, out, to)
    # It would quantise the weights of int8 anew in every call.
    options = {} if to == "fp8" else {"quantization_config": transformers.CompressedTensorsConfig(dequantize=True)}
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32, **options)
    ids = np.arange(1, 13).reshape(2, 6) * 5
    with torch.no_grad():
        want = theirs(torch.from_numpy(ids)).logits.numpy()
    found = interop.load(out, param_dtype="float32")(jnp.asarray(ids))
    np.testing.assert_allclose(found, want, rtol=0, atol=1e-5 * np.abs(want).max())


def test_int8_of_others_is_read_plain_and_in_parts_of_a_row(wide, tmp_path):
    """ "int-quantized", with a scale for each 75 of a row of 150, is what a plain loop says, whole and kept."""
    interop.quantise(wide["int8"], tmp_path / "packed", "int8")
    config = json.loads((tmp_path / "packed" / "config.json").read_text())
    config["quantization_config"]["format"] = "int-quantized"
    tensors = stored_quantised(tmp_path / "packed")
    for name in [name for name in tensors if name.endswith("_packed")]:
        shape = tensors.pop(name.replace("_packed", "_shape"))
        tensors[name.removesuffix("_packed")] = unpacked(tensors.pop(name), shape[1]).astype(np.int8)
    downs = [name for name in tensors if name.endswith("w2.weight")]
    for name in downs:
        tensors[f"{name}_scale"] = np.concatenate([tensors[f"{name}_scale"], 2 * tensors[f"{name}_scale"]], axis=1)
    out = write_checkpoint(tmp_path / "plain", config, tensors)
    loaded, kept = interop.load(out).params, interop.load(out, keep_quantised=True).params
    wo = jax.jit(lambda operand: dequantize(operand, jnp.float32))(kept["stacks.0.0.moe.wo"]).astype(jnp.bfloat16)
    np.testing.assert_array_equal(bits(wo), bits(loaded["stacks.0.0.moe.wo"]))
    for expert, name in enumerate(sorted(downs)):
        scale = tensors[f"{name}_scale"].astype(np.float64).repeat(75, axis=1)
        meant = (tensors[name] * scale).astype(np.float32).astype(ml_dtypes.bfloat16).T
        np.testing.assert_array_equal(bits(wo[0, expert]), bits(meant))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t, c: t.pop(f"{DOWN}_scale"), f"{DOWN}_packed is quantised; expected {DOWN}_scale beside it"),
        (lambda t, c: t.pop(f"{DOWN}_shape"), f"expected {DOWN}_shape beside it, found none"),
        (lambda t, c: t.update({f"{DOWN}_shape": np.asarray([136, 160])}), "for the sizes in"),
        (lambda t, c: t.update({f"{DOWN}_shape": np.asarray([136.0, 150.0])}), r"for float64\[2\]"),
        (lambda t, c: t.update({f"{DOWN}_scale": np.ones((136, 4), np.float32)}), r"found float32\[136, 4\]"),
        (lambda t, c: c["config_groups"]["group_0"]["weights"].update(num_bits=4), "in int8, symmetric"),
        (lambda t, c: c["config_groups"]["group_0"]["weights"].update(symmetric=False), "in int8, symmetric"),
        (lambda t, c: c.update(format="marlin-24"), "got format 'marlin-24'"),
        (lambda t, c: c.update(config_groups=None), "in int8, symmetric"),
    ],
)
def test_int8_that_is_broken_or_otherwise_is_refused(change, message, wide, tmp_path):
    interop.quantise(wide["int8"], tmp_path / "out", "int8")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    tensors = stored_quantised(tmp_path / "out")
    change(tensors, config["quantization_config"])
    with pytest.raises(ValueError, match=message):
        interop.load(write_checkpoint(tmp_path / "broken", config, tensors))
