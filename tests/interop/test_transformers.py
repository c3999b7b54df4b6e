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
from raggedmoe.kernels.dequantize import dequantize
from raggedmoe.kernels.qarray import QArray
from raggedmoe.models.decoder import decode, logits
from raggedmoe.models.generate import generate
from raggedmoe.models.presets import PRESETS
from tests.interop.folders import (
    FIXTURES,
    GOLDEN,
    SINGLE,
    TINY,
    bits,
    drawn_model,
    expected_of,
    layouts_of,
    stored_quantised,
)

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


def test_what_transformers_quantises_to_fp8_is_what_it_dequantises(tmp_path):
    """In blocks of 128 × 128: our reading, and the text that we make of it, against its own."""
    pytest.importorskip("accelerate", reason="transformers quantises with it")
    from tests.interop.fp8_by_transformers import save_in_fp8

    config = transformers.DeepseekV3Config(
        vocab_size=120,
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=128,
        num_hidden_layers=2,
        first_k_dense_replace=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=128,
        kv_lora_rank=128,
        qk_nope_head_dim=32,
        qk_rope_head_dim=128,
        v_head_dim=32,
        n_routed_experts=8,
        num_experts_per_tok=3,
        n_group=4,
        topk_group=2,
        max_position_embeddings=64,
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    save_in_fp8(transformers.DeepseekV3ForCausalLM(config), tmp_path / "fp8", (128, 128))
    stored = stored_quantised(tmp_path / "fp8")
    in_fp8 = {name for name, tensor in stored.items() if tensor.dtype == ml_dtypes.float8_e4m3fn}
    matrices = {name for name, tensor in stored.items() if tensor.ndim == 2 and not name.endswith("_scale_inv")}
    assert {name for name in matrices if "embed" not in name and "head" not in name and ".gate." not in name} == in_fp8

    from_pretrained = transformers.AutoModelForCausalLM.from_pretrained
    theirs = from_pretrained(tmp_path / "fp8", dtype=torch.bfloat16).to(torch.float32)
    ours = interop.load(tmp_path / "fp8", dtype="float32")
    ids = np.random.default_rng(1).integers(0, config.vocab_size, (2, 24))
    expected = their_logits(theirs, ids)
    assert np.abs(expected).max() > 1
    np.testing.assert_allclose(our_logits(ours, ids), expected, rtol=0, atol=TOLERANCE)
    prompt = torch.from_numpy(ids[:1, :8])
    with torch.no_grad():
        text = theirs.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=24, do_sample=False)
    assert [token for (token,) in generate(ours, prompt.tolist(), max_new_tokens=24)] == text[0, 8:].tolist()
    kept = interop.load(tmp_path / "fp8", keep_quantised=True, dtype="float32")
    for name, array in kept.params.items():
        if isinstance(array, QArray):
            whole = np.asarray(dequantize(array, jnp.float32)).astype(ml_dtypes.bfloat16)
            np.testing.assert_array_equal(bits(whole), bits(ours.params[name]), err_msg=name)
    assert any(isinstance(array, QArray) for array in kept.params.values())


TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TALK = [{"role": "user", "content": "How wide is an expert?"}, {"role": "assistant", "content": "  F = 24, naïvely."}]


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A Qwen3-MoE of odd sizes as `transformers` saves it: a trained tokenizer, a chat template, sampling settings."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    folder, torch_state = tmp_path_factory.mktemp("published"), torch.get_rng_state()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=333, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([(GOLDEN / "README.md").read_text()], trainer)
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", model_max_length=640
    )
    theirs.chat_template = TEMPLATE
    config = transformers.Qwen3MoeConfig(
        vocab_size=len(theirs) + 3,
        hidden_size=36,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=10,
        num_experts=7,
        num_experts_per_tok=3,
        moe_intermediate_size=20,
        max_position_embeddings=640,
        eos_token_id=theirs.eos_token_id,
        pad_token_id=theirs.pad_token_id,
        router_aux_loss_coef=0.003,
        attention_dropout=0.05,
        initializer_range=0.4,
    )
    torch.manual_seed(0)
    model = transformers.Qwen3MoeForCausalLM(config)
    torch.set_rng_state(torch_state)
    model.generation_config.update(do_sample=True, temperature=0.7, top_k=9, eos_token_id=[2, 0])
    model.save_pretrained(folder)
    theirs.save_pretrained(folder)
    return folder


def test_what_we_export_tokenises_and_generates_as_the_original_does(published, tmp_path):
    interop.save_native(interop.load(published), tmp_path / "ours")
    interop.save(interop.load(tmp_path / "ours"), tmp_path / "exported")
    before, after = (transformers.AutoTokenizer.from_pretrained(path) for path in (published, tmp_path / "exported"))
    assert type(after) is type(before)
    assert after.special_tokens_map == before.special_tokens_map
    assert (after.model_max_length, after.eos_token_id, after.chat_template) == (640, 2, TEMPLATE)
    for text in ("Experts route  tokens.\n\tnaïve ≠ 七", "<|im_start|>user\nhi<|im_end|>"):
        assert after(text).input_ids == before(text).input_ids
        assert after.decode(after(text).input_ids) == before.decode(before(text).input_ids)
    prompt = before.apply_chat_template(TALK, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    again = after.apply_chat_template(TALK, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    assert torch.equal(prompt["input_ids"], again["input_ids"])

    models = [transformers.AutoModelForCausalLM.from_pretrained(path) for path in (published, tmp_path / "exported")]
    settings = [model.generation_config.to_dict() for model in models]
    assert settings[0] == settings[1]
    configs = [model.config.to_dict() for model in models]
    for config in configs:
        config.pop("_name_or_path")
    assert configs[0] == configs[1]
    generated = []
    for model in models:
        torch.manual_seed(0)
        generated.append(model.generate(**prompt, max_new_tokens=20))
    assert torch.equal(*generated)
