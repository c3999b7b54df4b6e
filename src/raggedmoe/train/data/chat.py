"""Reading conversations: jsonl of messages, or of prompts and completions; the answers alone are learned."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from raggedmoe.storage import AnyPath
from raggedmoe.train.data.chat_template import ChatTemplate, RenderedChat
from raggedmoe.train.data.corpus import Corpus, Document, read_files
from raggedmoe.train.data.tokenizer import TextTokenizer

SUFFIXES = (".jsonl",)
EXAMPLE_FORMS = '{"messages": [{"role": …, "content": …}, …]} or {"prompt": …, "completion": …}'
CALL = 1000  # conversations that the tokenizer gets in a call


def read_chat_files(
    paths: Sequence[str],
    suffixes: Sequence[str],
    tokenizer: TextTokenizer,
    sequence_length: int,
    today: str | None = None,
) -> Corpus:
    """Read a conversation from each line of the files. One of more tokens than a sequence is cut.

    ``today`` is the date that a chat template may ask for, by default that of the clock.
    """
    template = read_template(tokenizer, today)
    named = [
        (f"{name}:{number}", chat)
        for name, path, content in read_files(paths, suffixes)
        for number, chat in _read_chats(path, content, template)
    ]
    return make_chat_corpus(named, ", ".join(paths), tokenizer, sequence_length)


def read_template(tokenizer: TextTokenizer, today: str | None) -> ChatTemplate:
    """Read the chat template that lies beside a tokenizer, which bytes have not."""
    if tokenizer.library is None:
        raise ValueError(
            "conversations (dataset_type=chat or hf): expected the tokenizer of a model, got bytes; use a model's "
            "folder, or tokenizer_path=.../tokenizer.json"
        )
    assert tokenizer.path is not None
    return ChatTemplate.read(tokenizer.path.parent, today)


def make_chat_corpus(
    named: Sequence[tuple[str, RenderedChat]], where: str, tokenizer: TextTokenizer, sequence_length: int
) -> Corpus:
    """Make a document of each conversation with an answer to learn. One of more tokens than a sequence is cut."""
    if not named:
        raise ValueError(f"{where}: expected conversations, got none; name other paths")
    documents, num_cut, num_left_out = [], 0, 0
    for name, document in _tokenize(named, tokenizer):
        learned = document.learned
        assert learned is not None
        if len(document.tokens) > sequence_length:
            num_cut += 1
            document = Document(name=name, tokens=document.tokens[:sequence_length], learned=learned[:sequence_length])
        if document.learned is not None and document.learned[1:].any():
            documents.append(document)
        else:
            num_left_out += 1
    if not documents:
        raise ValueError(
            f"{where}: expected answers to learn in {len(named)} conversations, got none within "
            f"max_target_length={sequence_length} tokens; use a larger one, or data with assistant messages"
        )
    learned_tokens = sum(int(document.learned.sum()) for document in documents if document.learned is not None)
    losses = f", {learned_tokens:,} of them in answers"
    if num_cut:
        losses += f"; {num_cut:,} of {len(named):,} are longer than {sequence_length} tokens and cut"
    if num_left_out:
        losses += f"; {num_left_out:,} left out, as no answer begins before that"
    return Corpus(documents=tuple(documents), tokenizer=tokenizer, kind="conversation", losses=losses)


def _read_chats(path: AnyPath, content: bytes, template: ChatTemplate) -> Iterator[tuple[int, RenderedChat]]:
    """Yield the conversations of a file with the numbers of their lines; an error names the line."""
    for number, line in enumerate(content.split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            yield number, render_chat(json.loads(line), template)
        except (ValueError, RecursionError) as error:  # that it is no JSON is one too
            raise ValueError(f"{path}, line {number}: {error}") from None


def render_chat(value: Any, template: ChatTemplate) -> RenderedChat:
    """Make the text of a line's conversation, and say which of it is learned."""
    if not isinstance(value, dict) or not ({"messages"} <= value.keys() or {"prompt", "completion"} <= value.keys()):
        got = sorted(value) if isinstance(value, dict) else type(value).__name__
        raise ValueError(f"expected {EXAMPLE_FORMS}, got {got}")
    if "messages" in value:
        return template.render(_messages(value["messages"], "messages"), tools=value.get("tools"))
    prompt, completion = value["prompt"], value["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        return RenderedChat(text=prompt + completion, answers=((len(prompt), len(prompt) + len(completion)),))
    before, after = _messages(prompt, "prompt"), _messages(completion, "completion")
    return template.render([*before, *after], first=len(before), tools=value.get("tools"))


def _messages(value: Any, name: str) -> list[Mapping[str, Any]]:
    is_list = isinstance(value, list) and all(isinstance(message, dict) and "role" in message for message in value)
    if not is_list or not value:
        raise ValueError(f"expected {name} to be a list of messages with a role and content, got {value!r:.80}")
    return value


def _tokenize(named: Sequence[tuple[str, RenderedChat]], tokenizer: TextTokenizer) -> Iterator[tuple[str, Document]]:
    """Yield each conversation as a document. A token is learned where its first character is an answer's."""
    dtype = np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32
    for start in range(0, len(named), CALL):
        part = named[start : start + CALL]
        encodings = tokenizer.library.encode_batch([chat.text for _, chat in part], add_special_tokens=False)
        for (name, chat), encoding in zip(part, encodings):
            tokens = np.asarray(encoding.ids, dtype)
            firsts = np.asarray([first for first, _ in encoding.offsets], np.int64)
            learned = np.zeros(len(tokens), bool)
            for begin, end in chat.answers:
                learned |= (firsts >= begin) & (firsts < end)
            if tokenizer.end is not None and not (tokens[learned] == tokenizer.end).any():
                tokens, learned = np.append(tokens, dtype(tokenizer.end)), np.append(learned, True)
            yield name, Document(name=name, tokens=tokens, learned=learned)
