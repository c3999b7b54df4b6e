"""A model that `transformers` made, with a tokenizer trained for it, is fine-tuned on conversations here and goes back.

What `transformers` then has of it: every tensor, our logits, the original's tokens, and answers that end by themselves.
Runs where torch and transformers are installed: `make test-peers` does that.
"""

import json

import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers

from raggedmoe import interop
from raggedmoe.cli.convert import export, import_
from raggedmoe.cli.generate import generate
from raggedmoe.cli.train import train
from tests.interop.test_transformers import TOLERANCE, loaded_by_transformers, our_logits, their_logits

REASON = "needs torch and transformers, which the library itself does not: make test-peers"
torch = pytest.importorskip("torch", reason=REASON)
transformers = pytest.importorskip("transformers", reason=REASON)
pytestmark = pytest.mark.slow

END = "<|im_end|>"
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ANSWERS = {
    "Which colour has the sky?": "Blue, most of the time.",
    "And the grass?": "Green.",
    "What do bees make?": "Honey, and wax.",
    "Naïve or 七?": "Both: naïve, 七.",
}
# Sizes that divide nothing, and that no preset has.
ATTENTION = {"hidden_size": 36, "num_hidden_layers": 3, "max_position_embeddings": 96, "rms_norm_eps": 1e-6}
QWEN3 = ATTENTION | {
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 10,
    "num_experts": 7,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 22,
    "intermediate_size": 50,
    "norm_topk_prob": True,
}
DEEPSEEK_V3 = ATTENTION | {
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "q_lora_rank": 18,
    "kv_lora_rank": 14,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 9,
    "n_routed_experts": 9,
    "n_group": 3,
    "topk_group": 2,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 22,
    "intermediate_size": 50,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
}
MODELS = {"qwen3_moe": ("Qwen3MoeConfig", QWEN3), "deepseek_v3": ("DeepseekV3Config", DEEPSEEK_V3)}


def trained_tokenizer():
    """A tokenizer of `transformers`, BPE of bytes trained on the conversations, with an end and a chat template."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=311, special_tokens=["<|im_start|>", END], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([*ANSWERS, *ANSWERS.values(), "user assistant"], trainer)
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=END)
    made.chat_template = TEMPLATE
    return made


def made_by_transformers(name, folder, initializer_range):
    """A folder as `transformers` writes it: a random model and the tokenizer that was trained for it."""
    tokenizer, (config_class, sizes) = trained_tokenizer(), MODELS[name]
    torch.manual_seed(3)
    special = {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": None, "pad_token_id": None}
    config = getattr(transformers, config_class)(
        **sizes, **special, vocab_size=len(tokenizer), initializer_range=initializer_range
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=MODELS)
def original(request, tmp_path_factory):
    return made_by_transformers(request.param, tmp_path_factory.mktemp("original") / request.param, 0.02)


# A head that stays as it was drawn has to be able to say what the adapters learn.
@pytest.fixture(scope="module", params=[("qwen3_moe", 0.02), ("deepseek_v3", 0.2)], ids=lambda param: param[0])
def to_adapt(request, tmp_path_factory):
    name, initializer_range = request.param
    return made_by_transformers(name, tmp_path_factory.mktemp("to_adapt") / name, initializer_range)


@pytest.fixture(scope="module")
def talks(tmp_path_factory):
    """Conversations of one question or of two, a line each."""
    path = tmp_path_factory.mktemp("talks") / "talks.jsonl"
    lines = [{"prompt": question, "completion": answer} for question, answer in ANSWERS.items()]
    turns = [
        [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        for question, answer in ANSWERS.items()
    ]
    lines += [{"messages": [*first, *second]} for first in turns for second in turns if first != second]
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return path


def finetune(folder, talks, out, learning_rate, *words):
    """Train on the conversations until they are known by heart; the run's folder."""
    data = ("dataset_type=chat", f"dataset_path={talks}", "held_out=0", "max_target_length=96")
    run = (
        "per_device_batch_size=8",
        "steps=150",
        f"learning_rate={learning_rate}",
        "enable_checkpointing=false",
        "dtype=float32",
    )
    assert train((str(folder), *data, *run, f"base_output_directory={out}", "run_name=run", *words)) == 0
    return out / "run"


def prompt_of(tokenizer, question):
    return tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False
    )


def answers_of(model, tokenizer):
    """What a model of `transformers` answers to each question, to the token that ends it."""
    answers = {}
    for question in ANSWERS:
        ids = tokenizer(prompt_of(tokenizer, question), return_tensors="pt").input_ids
        made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=60, do_sample=False)[
            0, ids.shape[1] :
        ]
        assert made[-1] == tokenizer.eos_token_id
        assert len(made) < 60
        answers[question] = tokenizer.decode(made[:-1])
    return answers


def check_goes_back(folder, ours, original, capsys):
    """Load an export in `transformers`, and hold logits, tokens and answers against ours and the original's."""
    model, wrong = loaded_by_transformers(folder)
    assert wrong == {}
    ids = np.random.default_rng(0).integers(0, ours.config.vocab_size, (2, 40))
    np.testing.assert_allclose(their_logits(model, ids), our_logits(ours, ids), rtol=0, atol=TOLERANCE)
    before, after = (transformers.AutoTokenizer.from_pretrained(path) for path in (original, folder))
    for text in (*ANSWERS, *ANSWERS.values(), f"a {END} b", " 七 ü\n\n"):
        assert after(text).input_ids == before(text).input_ids
        assert prompt_of(after, text) == prompt_of(before, text)
    assert answers_of(model, after) == ANSWERS
    question = next(iter(ANSWERS))
    capsys.readouterr()
    assert generate(str(folder), prompt_of(after, question), max_new_tokens=60, dtype="float32") == 0
    assert ANSWERS[question] in capsys.readouterr().out


def test_a_model_that_is_fine_tuned_whole_goes_back(original, talks, tmp_path, capsys):
    assert import_(str(original), str(tmp_path / "ours")) == 0
    run = finetune(tmp_path / "ours", talks, tmp_path, 1e-2)
    assert export(str(run), str(tmp_path / "out")) == 0
    ours = interop.load(tmp_path / "out", param_dtype=jnp.float32)
    check_goes_back(tmp_path / "out", ours, original, capsys)


FROZEN = ("embedding", "head", "norm", "router")


@pytest.mark.filterwarnings("default")  # PEFT warns of its own pattern for joined experts
def test_adapters_go_back_merged_and_by_themselves(to_adapt, talks, tmp_path, capsys):
    """Only matrices that have an adapter change; PEFT computes from the adapters alone what the merged model does."""
    peft = pytest.importorskip("peft", reason=REASON)
    run = finetune(to_adapt, talks, tmp_path, 2e-2, "lora_rank=8")
    assert export(str(run), str(tmp_path / "out"), merge=True) == 0
    ours, before = (interop.load(path, param_dtype=jnp.float32) for path in (tmp_path / "out", to_adapt))
    changed = {name for name in before.params if (ours.params[name] != before.params[name]).any()}
    assert changed == {name for name in before.params if not any(word in name for word in FROZEN)}
    check_goes_back(tmp_path / "out", ours, to_adapt, capsys)

    assert export(str(run), str(tmp_path / "adapters"), adapters=True) == 0
    model, _ = loaded_by_transformers(to_adapt)
    with_adapters = peft.PeftModel.from_pretrained(model, tmp_path / "adapters").eval()
    ids = np.random.default_rng(0).integers(0, ours.config.vocab_size, (2, 40))
    np.testing.assert_allclose(their_logits(with_adapters, ids), our_logits(ours, ids), rtol=0, atol=TOLERANCE)
    assert answers_of(with_adapters, transformers.AutoTokenizer.from_pretrained(tmp_path / "adapters")) == ANSWERS
