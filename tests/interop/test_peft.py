"""Adapters in PEFT's form: what PEFT computes with those that we write, and that what it writes is read."""

import dataclasses
import json
import warnings

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from raggedmoe import Decoder, LoraConfig, interop, merge_lora
from raggedmoe.cli.convert import export, import_
from raggedmoe.interop.named_model import load_config
from raggedmoe.lora import is_adapter
from raggedmoe.models.parameters import param_specs
from tests.models.drawn import EINSUM, drawn_ids, drawn_params, tiny

LORA = LoraConfig(rank=3, alpha=5.0, router="trained")


def adapted(folder, lora=LORA):
    """The model of a folder with drawn adapters, and with routers that were trained."""
    model = interop.load(folder)
    config, rng, params = dataclasses.replace(model.config, lora=lora), np.random.default_rng(1), dict(model.params)
    for name, spec in param_specs(config).items():
        if spec.updated_by is not None:
            old = np.asarray(params[name]) if name in params else 0
            params[name] = jnp.asarray(old + 0.3 * rng.standard_normal(spec.shape), jnp.float32)
    return Decoder(config, params=params, execution=EINSUM)


def saved_base(folder, name="deepseek-v3-tiny", **changes):
    config = tiny(name, num_layers=2, **changes)
    interop.save(Decoder(config, params=drawn_params(config)), folder)
    return folder


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return saved_base(tmp_path_factory.mktemp("base") / "model", dense_layers=(0,))


def assert_same_params(found, expected):
    assert found.params.keys() == expected.params.keys()
    for name, value in expected.params.items():
        assert np.asarray(found.params[name]).tobytes() == np.asarray(value).tobytes(), name


def test_what_is_written_is_read_again_to_the_bit(base, tmp_path):
    model = adapted(base)
    interop.save_peft(model, tmp_path / "peft", base=str(base))
    found = interop.load(tmp_path / "peft")
    assert found.config.lora == LORA
    assert load_config(tmp_path / "peft") == dataclasses.replace(
        found.config, dtype=load_config(tmp_path / "peft").dtype
    )
    assert_same_params(found, model)
    # ours keeps the base apart, and so does the command that converts it
    assert import_(str(tmp_path / "peft"), str(tmp_path / "ours")) == 0
    assert_same_params(interop.load(tmp_path / "ours"), model)
    assert export(str(tmp_path / "ours"), str(tmp_path / "again"), adapters=True) == 0
    first, second = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("peft", "again"))
    assert first.keys() == second.keys()
    assert all(np.array_equal(first[key], second[key]) for key in first)


def test_names_and_layouts_are_those_of_peft(base, tmp_path):
    model = adapted(base)
    interop.save_peft(model, tmp_path / "peft", base=str(base))
    tensors = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    prefix, config, lora = "base_model.model.model.layers.1.", model.config, param_specs(model.config)
    heads, rank = config.attention, LORA.rank
    kv_b = tensors[f"{prefix}self_attn.kv_b_proj.lora_B.weight"]
    assert kv_b.shape == (heads.num_heads * (heads.nope_dim + heads.value_dim), rank)
    of_head = kv_b.reshape(heads.num_heads, heads.nope_dim + heads.value_dim, rank)[1]
    expected = [np.asarray(model.params[f"stacks.1.0.attention.{name}_lora_b"])[0, :, 1].T for name in ("k_b", "v_b")]
    assert np.array_equal(of_head, np.concatenate(expected))
    down = tensors[f"{prefix}mlp.experts.2.down_proj.lora_A.weight"]
    assert np.array_equal(down, model.params["stacks.1.0.moe.wo_lora_a"][0, 2])
    assert lora["stacks.1.0.moe.wo_lora_a"].axes[-1] == "expert_dim"
    description = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert {"gate_proj", "up_proj", "down_proj", "q_a_proj", "o_proj"} <= set(description["target_modules"])
    # On transformers 5 PEFT takes every module of these names for the experts.
    assert "mlp.shared_experts.gate_proj.weight" in description["target_parameters"]
    assert (description["r"], description["lora_alpha"], description["modules_to_save"]) == (3, 5, ["mlp.gate"])


@pytest.mark.parametrize("targets", [("attention.wo",), ("attention.wq", "moe.wi_0")])
def test_some_targets_alone(tmp_path, targets):
    lora = LoraConfig(rank=2, alpha=3.0, targets=targets)
    model = adapted(saved_base(tmp_path / "base", "qwen3-tiny"), lora)
    interop.save_peft(model, tmp_path / "peft", base=str(tmp_path / "base"))
    found = interop.load(tmp_path / "peft")
    if targets == ("attention.wo",):
        assert found.config.lora == lora
    for name, value in merge_lora(model).params.items():  # gate goes with up, whose product is zero
        assert np.array_equal(merge_lora(found).params[name], value), name


def changed(folder, **changes):
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_ranks_and_scales_by_module(base, tmp_path):
    """Smaller ranks are filled up with zeros, and other scales are taken into the second matrix."""
    model = adapted(base, LoraConfig(rank=4, alpha=8.0, targets=("attention",)))
    interop.save_peft(model, tmp_path / "peft", base=str(base))
    path = tmp_path / "peft" / "adapter_model.safetensors"
    tensors = load_file(path)
    for key, value in tensors.items():
        if ".o_proj." in key:
            tensors[key] = value[:2].copy() if "lora_A" in key else value[:, :2].copy()
    save_file(tensors, path)
    changed(tmp_path / "peft", rank_pattern={"o_proj": 2}, alpha_pattern={"o_proj": 1, "q_b_proj": 2})
    found = interop.load(tmp_path / "peft")
    assert (found.config.lora.rank, found.config.lora.alpha) == (4, 8.0)
    first, second = (np.asarray(found.params[f"stacks.1.0.attention.wo{part}"])[0] for part in ("_lora_a", "_lora_b"))
    assert not first[2:].any()
    assert not second[2:].any()
    assert np.array_equal(second[:2], np.asarray(model.params["stacks.1.0.attention.wo_lora_b"])[0, :2] / 4)  # ½ for 2
    of_query = "stacks.1.0.attention.q_b_lora_b"
    assert np.array_equal(found.params[of_query], np.asarray(model.params[of_query]) / 4)
    changed(tmp_path / "peft", rank_pattern={}, alpha_pattern={}, use_rslora=True)
    assert interop.load(tmp_path / "peft").config.lora.alpha == 16.0  # 8 / √4, times the rank


def test_what_cannot_be_read_is_refused_by_name(base, tmp_path):
    model = adapted(base, LoraConfig(rank=2, targets=("attention",)))
    interop.save_peft(model, tmp_path / "peft", base=str(base))
    path = tmp_path / "peft" / "adapter_model.safetensors"
    whole, text = path.read_bytes(), (tmp_path / "peft" / "adapter_config.json").read_text()
    for change, message in (
        ({"use_dora": True}, "use_dora"),
        ({"peft_type": "IA3"}, "peft_type"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights .*got 'pissa_niter_4'"),
        ({"init_lora_weights": "olora"}, "init_lora_weights .*got 'olora'"),
        ({"base_model_name_or_path": "some/hub-name"}, "base_model_name_or_path"),
    ):
        changed(tmp_path / "peft", **change)
        with pytest.raises(ValueError, match=message):
            interop.load(tmp_path / "peft")
        (tmp_path / "peft" / "adapter_config.json").write_text(text)
    tensors = load_file(path)
    key = next(iter(sorted(tensors)))
    for broken, message in (
        ({name: value for name, value in tensors.items() if name != key}, "missing"),
        ({**tensors, "base_model.model.model.norm.lora_A.weight": tensors[key]}, "no linear layer"),
        ({**tensors, key: tensors[key][:, :-1].copy()}, "expected"),
    ):
        save_file(broken, path)
        with pytest.raises(ValueError, match=message):
            interop.load(tmp_path / "peft")
    path.write_bytes(whole)
    for beginning in (None, True, False, "gaussian", "eva", "orthogonal"):
        changed(tmp_path / "peft", init_lora_weights=beginning)
        interop.load(tmp_path / "peft")


def test_what_peft_has_no_form_for_is_refused(base, tmp_path):
    plain = interop.load(base)
    with pytest.raises(ValueError, match="got one of weights alone"):
        interop.save_peft(plain, tmp_path / "peft")
    with pytest.raises(ValueError, match="export --merge"):
        interop.save(adapted(base), tmp_path / "merged")
    gpt_oss = adapted(saved_base(tmp_path / "gpt-oss", "gpt-oss-tiny"), dataclasses.replace(LORA, router="frozen"))
    with pytest.raises(ValueError, match="lora_targets=attention"):
        interop.save_peft(gpt_oss, tmp_path / "peft")
    for matrix in ("moe.wi_0", "moe.wi_1"):
        one = adapted(tmp_path / "gpt-oss", LoraConfig(rank=2, targets=("attention", matrix)))
        with pytest.raises(ValueError, match="lora_targets=attention"):
            interop.save_peft(one, tmp_path / "peft")
    for name in ("gpt-oss", "mixtral"):
        folder = tmp_path / name if name == "gpt-oss" else saved_base(tmp_path / name, "mixtral-tiny")
        routed = adapted(folder, dataclasses.replace(LORA, targets=("attention",)))
        with pytest.raises(ValueError, match="expected lora_router=frozen, got trained"):
            interop.save_peft(routed, tmp_path / "peft")


def test_adapters_are_not_written_to_an_object_store(base):
    with pytest.raises(ValueError, match="s3://bucket/peft: expected a folder of this machine"):
        interop.save_peft(adapted(base), "s3://bucket/peft")


# --- PEFT itself

SIZES = {"vocab_size": 67, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"max_position_embeddings": 64, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 2, "moe_intermediate_size": 10}
LATENT = {"intermediate_size": 20, "moe_intermediate_size": 10, "n_routed_experts": 4, "num_experts_per_tok": 2}
LATENT |= {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 8, "kv_lora_rank": 12}
LATENT |= {"qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 8, "n_shared_experts": 1}
MODELS = {
    "DeepseekV3": {**SIZES, **LATENT, "num_key_value_heads": 4},
    "Qwen3Moe": {**SIZES, **EXPERTS, "intermediate_size": 20, "head_dim": 8, "mlp_only_layers": [0]},
    "DeepseekV2": {**SIZES, **LATENT, "num_key_value_heads": 4, "topk_method": "greedy"},
    "Olmoe": {**SIZES, **EXPERTS, "intermediate_size": 10},
    "Mixtral": {**SIZES, "intermediate_size": 10, "num_key_value_heads": 2, "num_local_experts": 4},
}


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    ("name", "router"),
    [
        pytest.param("DeepseekV3", "trained", marks=pytest.mark.ci),
        pytest.param("Qwen3Moe", "frozen", marks=pytest.mark.ci),
        *[pytest.param(name, "frozen", marks=pytest.mark.slow) for name in ("DeepseekV2", "Olmoe", "Mixtral")],
    ],
)
def test_peft_computes_what_we_do_and_what_it_writes_is_read(name, router, tmp_path):
    reason = "needs peft, torch and transformers, which the library itself does not"
    torch = pytest.importorskip("torch", reason=reason)
    transformers = pytest.importorskip("transformers", reason=reason)
    peft = pytest.importorskip("peft", reason=reason)
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**MODELS[name])
    transformers.AutoModelForCausalLM.from_config(config).float().save_pretrained(tmp_path / "base")
    how = {"dtype": torch.float32, "attn_implementation": "eager", "experts_implementation": "eager"}
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", **how)
    model = adapted(tmp_path / "base", dataclasses.replace(LORA, router=router))
    interop.save_peft(model, tmp_path / "peft", base=str(tmp_path / "base"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = peft.PeftModel.from_pretrained(theirs, tmp_path / "peft").eval()
        theirs.save_pretrained(tmp_path / "joined")
    ids = drawn_ids(model.config, 2, 9)
    with torch.no_grad():
        expected = theirs(torch.from_numpy(np.array(ids)).long(), use_cache=False).logits.numpy()
    found = np.asarray(model(ids))
    # Both in float32, through two layers: some hundred roundings of logits of about 1.
    np.testing.assert_allclose(found, expected, rtol=0, atol=128 * np.finfo(np.float32).eps * np.abs(expected).max())
    plain = np.asarray(
        Decoder(dataclasses.replace(model.config, lora=None), params=_without(model), execution=EINSUM)(ids)
    )
    assert np.abs(found - plain).max() > 0.1  # the adapters were there
    again = interop.load(tmp_path / "joined")
    assert again.config.lora.rank == 2 * LORA.rank  # gate and up are one adapter of twice the rank
    np.testing.assert_allclose(np.asarray(again(ids)), found, rtol=0, atol=1e-5)


def _without(model):
    return {name: value for name, value in model.params.items() if not is_adapter(name)}
