"""Matrices that stay in the fp8 or mxfp4 of their checkpoint: what they stand for, their size, the text they make."""

import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from raggedmoe import interop
from raggedmoe.interop import native
from raggedmoe.kernels.dequantize import dequantize
from raggedmoe.kernels.qarray import QArray
from raggedmoe.models.decoder import decode, logits
from raggedmoe.models.generate import generate
from tests.interop.folders import GOLDEN, bits, expected_of, quantised_in, stored_quantised, write_checkpoint
from tests.interop.test_golden import TOLERANCE
from tests.interop.test_quantized import fp8_folder, mxfp4_folder


def assert_stands_for_what_is_loaded(folder, dtype="bfloat16", form="fp8"):
    kept, loaded = (interop.load(folder, keep_quantised=keep, param_dtype=dtype) for keep in (True, False))
    assert kept.config == loaded.config
    quantised = {name for name, array in kept.params.items() if isinstance(array, QArray)}
    assert quantised == quantised_in(loaded.params, form) != set()
    for name, array in loaded.params.items():
        found = kept.params[name]
        if name in quantised:
            found = jax.jit(lambda stored: dequantize(stored, jnp.float32))(found).astype(dtype)
        np.testing.assert_array_equal(bits(found), bits(array), err_msg=name)
    return kept


# 128 is wider than every matrix of this model; of blocks of 9 × 7 the last ones are cut.
@pytest.mark.parametrize("block", [(128, 128), (16, 16), (9, 7)])
def test_matrices_in_fp8_stand_for_those_that_are_dequantised(block, tmp_path):
    folder, _, _, _ = fp8_folder(tmp_path / "fp8", block)
    kept = assert_stands_for_what_is_loaded(folder)
    assert_stands_for_what_is_loaded(folder, "float32")
    for name in quantised_in(kept.params, "fp8"):
        array = kept.params[name]
        assert array.qvalue.nbytes == np.prod(array.shape)


def test_experts_in_mxfp4_stand_for_those_that_are_dequantised_and_take_half_a_byte(tmp_path):
    folder, _, _ = mxfp4_folder(tmp_path / "mxfp4")
    kept = assert_stands_for_what_is_loaded(folder, form="mxfp4")
    for name in quantised_in(kept.params, "mxfp4"):
        array = kept.params[name]
        assert array.qvalue.nbytes == np.prod(array.shape) // 2
        assert array.scale.nbytes == np.prod(array.shape) // 32


def powers_of_two(folder, block=(16, 16)):
    """The fp8 checkpoint with factors that are powers of two, by which bfloat16 holds every weight exactly."""
    _, config, _, tensors = fp8_folder(folder / "any", block)
    for name in [name for name in tensors if name.endswith("_scale_inv")]:
        tensors[name] = np.exp2(np.round(np.log2(tensors[name])) - 3).astype(np.float32)
    return write_checkpoint(folder / "powers", config, tensors)


@pytest.mark.parametrize("stored", ["fp8", "mxfp4"])
def test_greedy_text_is_that_of_the_dequantised_model(stored, tmp_path):
    folder = powers_of_two(tmp_path) if stored == "fp8" else mxfp4_folder(tmp_path / "mxfp4")[0]
    prompts = [[5, 9, 2, 17], [3, 1]]
    texts = [
        list(generate(interop.load(folder, keep_quantised=keep), prompts, max_new_tokens=12)) for keep in (True, False)
    ]
    assert texts[0] == texts[1]
    assert len({token for tokens in texts[0] for token in tokens}) > 2


def test_our_own_format_has_no_quantised_experts(tmp_path):
    model = interop.load(mxfp4_folder(tmp_path / "mxfp4")[0], keep_quantised=True)
    with pytest.raises(ValueError, match="load it without keep_quantised"):
        native.save(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("form", ["fp8", "fp8 in blocks of 9 × 7", "mxfp4", "int8", "int8 of bfloat16"])
def test_quantised_matrices_are_written_as_they_came(form, tmp_path):
    """Bit for bit, values and scales; and what else config.json says stays."""
    if form == "mxfp4":
        folder = mxfp4_folder(tmp_path / "in")[0]
    elif form.startswith("int8"):
        folder, plain = tmp_path / "in", GOLDEN / "qwen3_moe"
        if "bfloat16" in form:
            interop.save(interop.load(plain), tmp_path / "narrow", dtype="bfloat16")
            plain = tmp_path / "narrow"
        interop.quantise(plain, folder, "int8")
    else:
        folder = fp8_folder(tmp_path / "in", (9, 7) if "9" in form else (16, 16))[0]
    model = interop.load(folder, keep_quantised=True)
    interop.save(model, tmp_path / "out")
    before, after = stored_quantised(folder), stored_quantised(tmp_path / "out")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        is_whole = tensor.dtype == np.float32 and "_scale" not in name  # which may be written in the model's type
        expected = tensor.astype(after[name].dtype) if is_whole else tensor
        np.testing.assert_array_equal(bits(after[name]), bits(expected), err_msg=name)
    settings = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    original = json.loads((folder / "config.json").read_text())["quantization_config"]
    key = "ignore" if form.startswith("int8") else "modules_to_not_convert"
    assert {**settings, key: 0} == {**original, key: 0}
    assert {*(original.get(key) or ())} <= {*settings[key]}
    again = interop.load(tmp_path / "out", keep_quantised=True)
    for (path, array), (_, other) in zip(*map(jax.tree_util.tree_leaves_with_path, (model.params, again.params))):
        np.testing.assert_array_equal(bits(array), bits(other), err_msg=str(path))


def test_a_model_that_lost_its_config_json_is_not_written_quantised(tmp_path):
    model = interop.load(mxfp4_folder(tmp_path / "mxfp4")[0], keep_quantised=True)
    model.companions = None
    with pytest.raises(ValueError, match=r"quantization_config for mxfp4, got None; give its folder as companions"):
        interop.save(model, tmp_path / "out")
    interop.save(model, tmp_path / "out", companions=tmp_path / "mxfp4")
    assert (tmp_path / "out" / "config.json").is_file()


def test_a_folder_without_quantised_matrices_is_refused(tmp_path):
    with pytest.raises(ValueError, match="expected matrices that are quantised"):
        interop.load(GOLDEN / "deepseek_v3", keep_quantised=True)


def test_a_matrix_of_which_one_expert_is_not_quantised_is_dequantised(tmp_path):
    folder, config, meant, tensors = fp8_folder(tmp_path / "fp8", (16, 16))
    name = "model.layers.1.mlp.experts.5.down_proj.weight"
    del tensors[f"{name}_scale_inv"]
    tensors[name] = meant[name].astype(ml_dtypes.bfloat16)
    kept = interop.load(write_checkpoint(folder, json.loads(json.dumps(config)), tensors), keep_quantised=True).params
    of_downs = {isinstance(array, QArray) for key, array in kept.items() if key.endswith(".moe.wo")}
    of_ups = {isinstance(array, QArray) for key, array in kept.items() if key.endswith(".moe.wi_0")}
    assert False in of_downs
    assert of_ups == {True}


@pytest.mark.ci
@pytest.mark.parametrize("name", ["quantised/deepseek_v3_fp8", "quantised/gpt_oss_mxfp4"])
def test_a_golden_model_that_others_quantised_writes_the_text_that_transformers_writes(name):
    """Kept as it is stored and dequantised, both, as bfloat16 holds its weights exactly; activations in float32."""
    expected = expected_of(name)
    prompt = expected["ids"][:1, :8].tolist()
    for keep in (True, False):
        model = interop.load(GOLDEN / name, keep_quantised=keep, dtype="float32")
        scores = jax.jit(
            lambda params, ids, config=model.config: logits(params, decode(params, ids, config).hidden, config)
        )
        found = scores(model.params, jnp.asarray(expected["ids"]))
        np.testing.assert_allclose(found, expected["logits"], rtol=0, atol=TOLERANCE)
        text = [token for (token,) in generate(model, prompt, max_new_tokens=expected["greedy"].shape[1])]
        assert text == expected["greedy"][0].tolist()
        assert any(isinstance(array, QArray) for array in model.params.values()) == keep


def assert_takes_the_bytes_of_the_file(model, folder):
    """All of a model's parameters, but that routers, and what is stored in another type, are held in their own."""
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(model.params))
    in_file = {name: tensor.nbytes for name, tensor in stored_quantised(folder).items()}
    routers = [name for name in model.params if name.rpartition(".")[2].startswith("router_kernel")]
    held -= sum(model.params[name].nbytes for name in routers)
    whole = sum(size for name, size in in_file.items() if not name.endswith(("mlp.gate.weight", "router.weight")))
    assert held == whole


@pytest.mark.ci
@pytest.mark.parametrize("stored", ["fp8", "mxfp4"])
def test_greedy_text_is_that_of_transformers_which_dequantises(stored, tmp_path):
    """Weights that are exact in bfloat16, read by both from one folder; activations of both in float32.

    `transformers` widens every weight, ours keep matrices as they are stored: their memory is that of the file.
    """
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    folder = powers_of_two(tmp_path, (128, 128)) if stored == "fp8" else mxfp4_folder(tmp_path / "mxfp4")[0]
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(torch.float32)
    prompt = [5, 9, 2, 17]
    with torch.no_grad():
        out = theirs.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False, eos_token_id=None)
    model = interop.load(folder, keep_quantised=True, dtype="float32")
    ours = [token for (token,) in generate(model, [prompt], max_new_tokens=24)]
    assert ours == out[0, len(prompt) :].tolist()
    assert len(set(ours)) > 4
    assert_takes_the_bytes_of_the_file(model, folder)
