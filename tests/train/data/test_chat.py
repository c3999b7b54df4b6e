"""Conversations: their text by the tokenizer's own template, the answers that are learned, and rows that cut none."""

import json
from datetime import date

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from raggedmoe.hardware import target_hardware
from raggedmoe.models.presets import model_preset
from raggedmoe.train.data.batches import open_data
from raggedmoe.train.settings.config import list_changes
from raggedmoe.train.settings.model_defaults import keep_earlier_defaults, with_model_defaults
from raggedmoe.train.settings.resolve import resolve
from raggedmoe.train.settings.sections import DataConfig
from raggedmoe.train.settings.words import read_words

PLAIN = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{%- for message in messages -%}{%- if message['role'] == 'assistant' -%}<|im_start|>assistant\n"
    "{%- generation -%}{{ message['content'] }}<|im_end|>{%- endgeneration -%}\n"
    "{%- else -%}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{%- endif -%}{%- endfor -%}"
)
# It leaves out what was thought before the last question, as Qwen3's does.
FORGETFUL = (
    "{% for message in messages %}{{ message['role'] }}:"
    "{% if loop.last %}{{ message['thought'] }}{% endif %}{{ message['content'] }}<|im_end|>{% endfor %}"
)


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **rest):
    return {"role": "assistant", "content": text, **rest}


SHORT = [user("hi"), assistant("yes")]
LONG = [{"role": "system", "content": "be short"}, user("naïve?"), assistant("no"), user("and?"), assistant("ok 七")]


@pytest.fixture
def folder(tmp_path):
    """A tokenizer of bytes and three special tokens, with a chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({character: number for number, character in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    (tmp_path / "chat_template.jinja").write_text(PLAIN)
    return tmp_path


def opened(folder, *lines, **changes):
    """The data of a file with those conversations."""
    (folder / "chat.jsonl").write_text("\n".join(json.dumps(line) for line in lines) + "\n\n")
    settings = {"max_target_length": 128, "held_out": 0.0, **changes}
    config = DataConfig(
        dataset_type="chat",
        dataset_path=(str(folder / "chat.jsonl"),),
        tokenizer_path=str(folder / "tokenizer.json"),
        **settings,
    )
    return open_data(config, 300, 1)


def rows_of(data):
    return data.train.batch(range(data.train.num_rows))


def texts(data, batch):
    """Return, for each row, the text of its tokens and that of its targets that are learned."""
    decode = data.tokenizer.library.decode
    for ids, targets, segments, weights in zip(batch.ids, batch.targets, batch.segments, batch.weights):
        inside, learned = ids[segments >= 0].tolist(), targets[weights > 0].tolist()
        yield tuple(decode(tokens, skip_special_tokens=False) for tokens in (inside, learned))


def texts_of(data):
    return sorted(texts(data, rows_of(data)))


def test_conversations_that_are_trained_on_are_no_set_to_evaluate_on(folder):
    (folder / "other.jsonl").write_text(json.dumps({"messages": LONG}))
    data = opened(folder, {"messages": SHORT}, eval_paths=(f"other={folder / 'other.jsonl'}",))
    assert list(data.evaluated) == ["other"]
    with pytest.raises(ValueError, match=r"eval_paths=it=.*expected files that are not trained on, got .*chat\.jsonl"):
        opened(folder, {"messages": SHORT}, eval_paths=(f"it={folder}",))


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_a_conversation_is_written_by_the_template_and_its_answers_are_learned(folder, template):
    (folder / "chat_template.jinja").write_text(template)
    ((text, learned),) = texts_of(opened(folder, {"messages": LONG}))
    assert text.replace("\n", "") == (
        "<|im_start|>systembe short<|im_end|><|im_start|>usernaïve?<|im_end|><|im_start|>assistantno<|im_end|>"
        "<|im_start|>userand?<|im_end|><|im_start|>assistantok 七<|im_end|>"
    )
    assert learned.replace("\n", "") == "no<|im_end|>ok 七<|im_end|>"


def test_the_template_may_stand_in_the_tokenizers_settings(folder):
    (folder / "chat_template.jinja").unlink()
    for value in (PLAIN, [{"name": "tools", "template": "x"}, {"name": "default", "template": PLAIN}]):
        settings = {"eos_token": "<|im_end|>", "chat_template": value}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        ((_, learned),) = texts_of(opened(folder, {"messages": SHORT}))
        assert learned == "yes<|im_end|>\n"


def test_of_a_prompt_and_a_completion_the_completion_is_learned(folder):
    lines = (
        {"prompt": "2 + 2 =", "completion": " 4"},
        {"prompt": LONG[:4], "completion": LONG[4:]},  # not the answer that is part of the prompt
    )
    found = texts_of(opened(folder, *lines, packing=False))
    assert [learned for _, learned in found] == [" 4<|im_end|>", "ok 七<|im_end|>\n"]
    assert found[0][0] == "2 + 2 = 4<|im_end|>"


def test_where_no_template_ends_an_answer_the_end_token_does(folder):
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m['content'] + '.' }}{% endfor %}")
    for add_eos, expected in ((True, "yes.<|im_end|>"), (False, "yes.")):
        ((_, learned),) = texts_of(opened(folder, {"messages": SHORT}, add_eos=add_eos))
        assert learned == expected


def test_conversations_are_packed_whole_and_see_themselves_alone(folder):
    size = len("XuserNhiXNXassistantNyesXN".replace("N", " "))  # a token each: letters, X for special ones
    data = opened(folder, *[{"messages": SHORT}] * 5, max_target_length=2 * size + 5)
    batch = rows_of(data)
    assert data.train.num_rows == 3
    for segments, positions in zip(batch.segments, batch.positions):
        for number in range(segments.max() + 1):
            assert positions[segments == number].tolist() == list(range((segments == number).sum()))
    learned = "".join(learned for _, learned in texts_of(data))
    assert learned == "yes<|im_end|>\n" * 5
    unpacked = opened(folder, *[{"messages": SHORT}] * 5, packing=False)
    assert unpacked.train.num_rows == 5


def test_what_is_too_long_is_cut_and_counted(folder):
    late = [user("x" * 90), assistant("never seen")]
    data = opened(folder, {"messages": SHORT}, {"messages": [*SHORT, *late]}, {"messages": late}, max_target_length=40)
    assert "2 of 3 are longer than 40 tokens and cut; 1 left out, as no answer begins before that" in data.describe()
    assert "2 conversations" in data.describe()
    assert [learned for _, learned in texts_of(data)] == ["yes<|im_end|>\n"] * 2
    assert max(data.train.spans.lengths) <= 40


def test_what_is_learned_is_part_of_the_fingerprint(folder):
    first = opened(folder, {"prompt": "ab", "completion": "c"}).fingerprint
    assert opened(folder, {"prompt": "a", "completion": "bc"}).fingerprint != first


def test_some_conversations_are_held_out_whole(folder):
    lines = [{"prompt": f"{number}?", "completion": f" {number}!"} for number in range(40)]
    data = opened(folder, *lines, held_out=0.2, packing=False)
    held_out = data.held_out.batch(range(data.held_out.num_rows))
    answers = {learned for _, learned in texts(data, held_out)}
    assert 4 <= len(answers) <= 12
    assert not answers & {learned for _, learned in texts_of(data)}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"text": "x"}, r"chat\.jsonl, line 2: expected \{\"messages\".*got \['text'\]"),
        ([1], "line 2: expected .*got list"),
        ({"messages": []}, "line 2: expected messages to be a list of messages"),
        ({"messages": [{"content": "x"}]}, "line 2: expected messages to be a list of messages with a role"),
        ({"messages": [user("x")]}, "line 2: expected an assistant message to learn from"),
        ({"messages": [user("x"), {"role": "assistant"}]}, "line 2: the chat template of .* refuses it"),
    ],
)
def test_a_line_that_is_no_conversation_is_named(folder, line, message):
    template = PLAIN.replace("{{ message['content'] }}", "{{ message['content'] + '' }}")
    (folder / "chat_template.jinja").write_text(template)
    with pytest.raises(ValueError, match=message):
        opened(folder, {"messages": SHORT}, line)


def test_what_cannot_be_read_is_named(folder):
    (folder / "chat_template.jinja").write_text("{% if %}")
    with pytest.raises(ValueError, match="expected a chat template that jinja2 reads"):
        opened(folder, {"messages": SHORT})
    (folder / "chat_template.jinja").write_text("{{ raise_exception('no system message, please') }}")
    with pytest.raises(ValueError, match="refuses it: no system message, please"):
        opened(folder, {"messages": SHORT})
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(ValueError, match=r"expected a chat template for messages, got neither chat_template\.jinja"):
        opened(folder, {"messages": SHORT})
    with pytest.raises(ValueError, match=r"dataset_type=chat or hf\): expected the tokenizer of a model, got bytes"):
        open_data(DataConfig(dataset_type="chat", dataset_path=(str(folder),)), 256, 1)


def test_a_template_that_rewrites_earlier_answers_is_refused_and_says_what_to_do(folder):
    (folder / "chat_template.jinja").write_text(FORGETFUL)
    talk = [user("a"), assistant("b", thought="hm "), user("c"), assistant("d", thought="ah ")]
    with pytest.raises(ValueError, match=r"writes message 2 in another way when more follows.*\{% generation %\}"):
        opened(folder, {"messages": talk})


def test_a_template_cannot_reach_python(folder):
    (folder / "chat_template.jinja").write_text("{{ messages.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(ValueError, match=r"refuses it: .*unsafe"):
        opened(folder, {"messages": SHORT})


def test_the_date_that_a_template_asks_for_is_the_runs(folder):
    (folder / "chat_template.jinja").write_text("{{ strftime_now('%d %b %Y, %H:%M') }}: " + PLAIN)
    first, same, other = (
        opened(folder, {"messages": SHORT}, chat_date=day) for day in ("2026-05-31", "2026-05-31", "2026-06-01")
    )
    assert texts_of(first)[0][0].startswith("31 May 2026, 00:00: ")
    assert first.fingerprint == same.fingerprint != other.fingerprint


def test_a_run_keeps_the_day_on_which_it_began():
    model, hardware = model_preset("demo"), target_hardware()
    words = ("dataset_type=chat", "dataset_path=x", "tokenizer_path=y")
    assert resolve(read_words(words), hardware).data.chat_date == date.today().isoformat()
    resumed = keep_earlier_defaults(read_words(words), {"chat_date": "2026-05-31"})
    assert with_model_defaults(resumed, model).data.chat_date == "2026-05-31"
    typed = keep_earlier_defaults(read_words((*words, "chat_date=2026-06-01")), {"chat_date": "2026-05-31"})
    assert with_model_defaults(typed, model).data.chat_date == "2026-06-01"
    assert list_changes({"chat_date": "2026-05-31"}, typed.values()) == ["chat_date=2026-05-31 is now 2026-06-01"]
    assert with_model_defaults(read_words(("dataset_type=stdlib",)), model).data.chat_date is None
    with pytest.raises(ValueError, match="chat_date=tomorrow: expected a date such as 2026-05-31"):
        read_words((*words, "chat_date=tomorrow"))


def test_transformers_learns_the_same_tokens(folder):
    transformers = pytest.importorskip("transformers")
    (folder / "chat_template.jinja").write_text(MARKED)
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), eos_token="<|im_end|>")
    theirs.chat_template = MARKED
    for talk in (SHORT, LONG):
        expected = theirs.apply_chat_template(talk, return_dict=True, return_assistant_tokens_mask=True)
        batch = rows_of(opened(folder, {"messages": talk}))
        present = batch.segments[0] >= 0
        assert batch.ids[0][present].tolist() == expected["input_ids"]
        # Ours say which token is the target of the one before it.
        mask = np.asarray(expected["assistant_masks"], bool)
        assert (batch.weights[0][present][:-1] > 0).tolist() == mask[1:].tolist()


def test_the_dataset_is_known_on_the_command_line(folder):
    words = ("qwen3-tiny", "vocab_size=300", "dataset_type=chat", "dataset_path=a.jsonl", "tokenizer_path=t.json")
    assert read_words(words).data.dataset_type == "chat"
