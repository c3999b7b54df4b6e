"""Our exports in Hugging Face `transformers`: it loads them without a missing or left-over tensor, to the same logits.

Runs where torch and transformers are installed (`pip install torch transformers`); skipped elsewhere.
"""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from raggedmoe import interop
from raggedmoe.interop.families.registry import FAMILIES
from raggedmoe.interop.hf_config import ConfigReader
from raggedmoe.interop.quantized import Mxfp4Tensor
from raggedmoe.interop.safetensors_file import read_header
from raggedmoe.models.decoder import decode, logits
from raggedmoe.models.presets import PRESETS
from tests.interop.folders import FIXTURES, GOLDEN, SINGLE, TINY, drawn_model, expected_of, layouts_of

REASON = "needs torch and transformers, which the library itself does not"
torch = pytest.importorskip("torch", reason=REASON)
transformers = pytest.importorskip("transformers", reason=REASON)

TOLERANCE = 2e-4


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def loaded_by_transformers(folder):
    """The model in float32, and the names that it missed or did not expect."""
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation="eager",
        output_loading_info=True,
    )
    return model.eval(), {kind: sorted(map(str, names)) for kind, names in report.items() if names}


def their_logits(model, ids):
    with torch.no_grad():
        return model(torch.from_numpy(ids).long(), use_cache=False).logits.numpy()


def our_logits(model, ids):
    scores = jax.jit(lambda params, ids: logits(params, decode(params, ids, model.config).hidden, model.config))
    return np.asarray(scores(model.params, jnp.asarray(ids, jnp.int32)))


@pytest.mark.parametrize(
    ("name", "layout"),
    [(name, layout) for name in FIXTURES for layout in layouts_of("gpt_oss" if name == "gpt_oss" else "")],
)
def test_a_golden_model_that_we_export_gives_the_golden_logits(name, layout, golden_model, tmp_path):
    expected = expected_of(name)
    interop.save(golden_model(name), tmp_path / "out", layout=layout)
    model, wrong = loaded_by_transformers(tmp_path / "out")
    assert wrong == {}
    np.testing.assert_allclose(their_logits(model, expected["ids"]), expected["logits"], rtol=0, atol=TOLERANCE)


@pytest.fixture(scope="module")
def drawn():
    """A tiny preset's model and our logits for some tokens."""
    made = {}

    def model_and_logits(name):
        if name not in made:
            model = drawn_model(replace(PRESETS[name], mtp_layers=0))
            ids = np.random.default_rng(1).integers(0, model.config.vocab_size, (2, 24))
            made[name] = model, ids, our_logits(model, ids)
        return made[name]

    return model_and_logits


@pytest.mark.parametrize(
    ("name", "layout"), [(name, layout) for name in TINY for layout in layouts_of(PRESETS[name].family)]
)
def test_a_model_of_ours_gives_the_same_logits_in_transformers(name, layout, drawn, tmp_path):
    ours, ids, expected = drawn(name)
    interop.save(ours, tmp_path / "out", layout=layout, shard_bytes=100_000)
    model, wrong = loaded_by_transformers(tmp_path / "out")
    assert wrong == {}
    assert np.abs(expected).max() > 1
    np.testing.assert_allclose(their_logits(model, ids), expected, rtol=0, atol=TOLERANCE)


def test_transformers_leaves_out_exactly_the_multi_token_module(tmp_path):
    ours = drawn_model(PRESETS["deepseek-v3-tiny"])
    config = ours.config
    interop.save(ours, tmp_path / "out", layout="fused")
    model, wrong = loaded_by_transformers(tmp_path / "out")
    prefix = f"model.layers.{config.num_layers}."
    module = sorted(name for name in read_header(tmp_path / "out" / SINGLE)[0] if name.startswith(prefix))
    assert wrong == {"unexpected_keys": module}
    ids = np.random.default_rng(1).integers(0, config.vocab_size, (1, 24))
    np.testing.assert_allclose(their_logits(model, ids), our_logits(ours, ids), rtol=0, atol=TOLERANCE)


def _read_or_refused(values):
    try:
        return FAMILIES[values["model_type"]].read_config(ConfigReader("config.json", values))
    except ValueError:
        return None


@pytest.mark.parametrize("name", [name for name in FIXTURES if name not in ("deepseek_v2_lite", "qwen3_moe_tied")])
def test_a_key_that_is_left_out_means_what_it_means_in_transformers_or_is_refused(name):
    values = json.loads((GOLDEN / name / "config.json").read_text())
    kind = type(transformers.AutoConfig.for_model(values["model_type"]))
    different = []
    # transformers has no multi-token prediction: with tensors and without the key, we refuse them as unknown.
    for key in sorted(values.keys() - {"model_type", "num_nextn_predict_layers"}):
        rest = {other: value for other, value in values.items() if other != key}
        ours = _read_or_refused(rest)
        if ours is None:
            continue
        theirs = {**kind.from_dict(rest).to_dict(), "model_type": values["model_type"]}
        if ours != _read_or_refused(theirs):
            different.append(key)
    assert different == []


def test_every_byte_of_fp8_is_what_torch_says():
    every = np.arange(256, dtype=np.uint8)
    expected = torch.from_numpy(every).view(torch.float8_e4m3fn).float().numpy()
    np.testing.assert_array_equal(every.view(ml_dtypes.float8_e4m3fn).astype(np.float32), expected)


def test_mxfp4_is_what_transformers_says(tmp_path):
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (2, 6, 3, 16), np.uint8)
    scales = rng.integers(100, 140, (2, 6, 3), np.uint8)
    save_file({"blocks": blocks, "scales": scales}, tmp_path / SINGLE)
    stored, _ = read_header(tmp_path / SINGLE)
    ours = Mxfp4Tensor(blocks=stored["blocks"], exponents=stored["scales"]).read()
    theirs = convert_moe_packed_tensors(torch.from_numpy(blocks), torch.from_numpy(scales))
    # Theirs is inputs first.
    np.testing.assert_array_equal(ours.astype(np.float32), theirs.float().numpy().transpose(0, 2, 1))
