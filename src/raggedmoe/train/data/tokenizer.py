"""From text to tokens: as bytes, or through a tokenizer.json."""

import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from raggedmoe.interop.companions import CONFIG, GENERATION, KEPT_CONFIG, as_json, read_companions
from raggedmoe.interop.json_file import read_json_object
from raggedmoe.interop.progress import bytes_bar
from raggedmoe.models.companions import Companions
from raggedmoe.storage import AnyPath

_log = logging.getLogger(__name__)
NUM_BYTES = 256
TOKENIZER, TOKENIZER_CONFIG, SPECIAL_TOKENS = "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"
END_BYTE = 0xFF  # no text in UTF-8 has it
END_TEXT = "<|endoftext|>"  # of the byte that ends a text
# What public tokenizers call the token that ends a text, for those that come without a file that says so.
USUAL_ENDS = (END_TEXT, "</s>", "<|end_of_text|>", "<eos>", "<｜end▁of▁sentence｜>", "<|im_end|>", "[EOS]")
# The tokenizer takes about 150 bytes of memory a character while it works, and one core a text: so long texts are split
# into parts of this many characters, and it gets parts of this many characters in a call.
_PART_CHARACTERS = 2**18
CALL_CHARACTERS = 2**21
# Tokenizers cut here anyway, so a part's tokens are those that the whole text would have there: where a line ends after
# a letter or a digit, and where one begins with such after a line that is not empty.
_LINE_END = re.compile(r"(?<=[^\W_])(?=\n)|(?<=\S\n)(?=[^\W_])")


@dataclass(frozen=True, kw_only=True)
class TextTokenizer:
    """What makes tokens of text. Without a tokenizer of the tokenizers package, they are its bytes."""

    text: str  # its tokenizer.json
    vocab_size: int  # one more than its largest token
    library: Any = None  # the tokenizer of the tokenizers package
    path: AnyPath | None = None  # of its tokenizer.json
    end: int | None = None  # the token that is put after each document; None: there is none

    @property
    def unit(self) -> str:
        """What a token is called."""
        return "bytes" if self.library is None else "tokens"

    def encode(self, contents: Sequence[tuple[AnyPath, bytes]]) -> list[np.ndarray]:
        """Return the tokens of each file's content, none of nothing. The last is the one that ends a text.

        Other special tokens, as there are around a prompt, are left out.
        """
        if self.library is not None:
            tokens = self._tokenize([_decode_utf8(path, content) for path, content in contents])
        else:
            tokens = [np.frombuffer(content, np.uint8) for _, content in contents]
            self._warn_of_ends_within(contents, tokens)
        if self.end is None:
            return tokens
        return [np.append(array, array.dtype.type(self.end)) if len(array) else array for array in tokens]

    def _warn_of_ends_within(self, contents: Sequence[tuple[AnyPath, bytes]], tokens: Sequence[np.ndarray]) -> None:
        """Warn of files that are no text, with bytes that a model would learn as the end of one."""
        has_end = [self.end is not None and bool((array == self.end).any()) for array in tokens]
        binaries = [path for (path, _), is_binary in zip(contents, has_end) if is_binary]
        if binaries:
            _log.warning(
                "%s and %d other files have the byte %#x, which no UTF-8 has and which ends a text here; convert them "
                "to UTF-8, or use add_eos=false",
                binaries[0],
                len(binaries) - 1,
                self.end,
            )

    def with_end(self, text: str | None) -> "TextTokenizer":
        """Return the tokenizer with the token that ends a text: the one of that text, or what its files say."""
        if self.library is None:
            return self
        if text is not None:
            end = self.library.token_to_id(text)
            if end is None:
                raise ValueError(f"eos_token={text}: expected a token of {self.path}, which has none of that text")
            return replace(self, end=end)
        assert self.path is not None
        end = _find_end(self.path, self.library)
        if end is None:
            _log.warning(
                "%s: no token is known to end a text, so a model does not learn to stop; name it with eos_token=..., "
                "or use add_eos=false",
                self.path,
            )
        return replace(self, end=end)

    def with_companions(self, of_model: Companions, folder: AnyPath | None) -> Companions:
        """Return a model's companions with this tokenizer, and with the files that belong to it.

        If it is the model's own, which may lie elsewhere too, they are those of the model, with what lies beside it
        there. Otherwise the files beside it take the place of all that the model has of its old tokenizer.
        """
        files = dict(of_model.files)
        config_json = dict(of_model.config_json)
        is_the_models = self._lies_in(folder) or files.get(TOKENIZER) == self.text.encode()
        if is_the_models:
            files |= self._files_beside()
        else:
            generation = _without_tokens(json.loads(files.get(GENERATION, b"{}")))
            files = {name: content for name, content in files.items() if name.startswith(("LICENSE", "NOTICE"))}
            files |= {GENERATION: as_json(generation)} if generation else {}
            config_json = _without_tokens(config_json)
            files |= {} if self.path is None else read_companions(self.path.parent).files
            files.setdefault(TOKENIZER_CONFIG, as_json(self._minimal_config()))
        files[TOKENIZER] = self.text.encode()
        if self.end is not None:
            generation = json.loads(files.get(GENERATION, b"{}"))
            generation["eos_token_id"] = _with_token(generation.get("eos_token_id"), self.end)
            config_json["eos_token_id"] = _with_token(config_json.get("eos_token_id"), self.end)
            files[GENERATION] = as_json(generation)
        return Companions(files=files, config_json=config_json)

    def _lies_in(self, folder: AnyPath | None) -> bool:
        return self.path is not None and folder is not None and self.path.parent.absolute() == folder.absolute()

    def _files_beside(self) -> dict[str, bytes]:
        """Read the files beside it that somebody wrote for it, such as a chat template; `_minimal_config` is ours."""
        if self.path is None:
            return {}
        ours = as_json(self._minimal_config())
        beside = read_companions(self.path.parent).files
        return {name: content for name, content in beside.items() if name != GENERATION and content != ours}

    def _minimal_config(self) -> dict[str, Any]:
        """Make a tokenizer_config.json that has transformers take the tokenizer.json as it is."""
        tokenizer_config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        if self.end is not None:
            tokenizer_config["eos_token"] = END_TEXT if self.library is None else self.library.id_to_token(self.end)
        return tokenizer_config

    @property
    def dtype(self) -> np.dtype:
        """The smallest type that holds all tokens."""
        return np.dtype(np.uint8 if self.library is None else np.uint16 if self.vocab_size <= 2**16 else np.uint32)

    def encode_texts(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the tokens of each text, with nothing before or after them."""
        if self.library is None:
            return [np.frombuffer(text.encode(), np.uint8) for text in texts]
        encodings = self.library.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.asarray(encoding.ids, self.dtype) for encoding in encodings]

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, without special ones. Half a character is shown as the sign for one unknown."""
        if self.library is None:
            return bytes(token for token in tokens if token != self.end).decode(errors="replace")
        return self.library.decode(list(tokens))

    def _tokenize(self, texts: Sequence[str]) -> list[np.ndarray]:
        text_arrays: list[list[np.ndarray]] = [[np.zeros(0, self.dtype)] for _ in texts]
        parts = [(number, part) for number, text in enumerate(texts) for part in text_parts(text)]
        with bytes_bar("tokenizing", sum(map(len, texts)), shown=True) as advance:
            for call in _batch_parts(parts):
                for (number, _), tokens in zip(call, self.encode_texts([part for _, part in call])):
                    text_arrays[number].append(tokens)
                advance(sum(len(part) for _, part in call))
        return [np.concatenate(arrays) for arrays in text_arrays]


def _without_tokens(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings without the numbers of a tokenizer's tokens."""
    return {key: value for key, value in settings.items() if not key.endswith(("_token_id", "_token_ids"))}


def _with_token(tokens: Any, end: int) -> int | list[int]:
    """Return the tokens that end a text, as one number or several, with one more."""
    known = tokens if isinstance(tokens, list) else [] if tokens is None else [tokens]
    known = known if end in known else [*known, end]
    return known[0] if len(known) == 1 and not isinstance(tokens, list) else known


def byte_tokenizer_json(*, ends: bool = False) -> str:
    """Make a tokenizer.json whose tokens are the 256 bytes, without merges; a token's number is its byte.

    With ``ends`` the byte 0xff, which is in no text, is the token that ends one.
    """
    # The format writes a byte as a character that can be seen: itself where Latin-1 shows one, or else the next free
    # character from 256 on.
    shown = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    stand_ins = iter(range(256, 512))
    vocab = {chr(byte if byte in shown else next(stand_ins)): byte for byte in range(NUM_BYTES)}
    special: list[dict[str, Any]] = []
    if ends:
        vocab = {text: byte for text, byte in vocab.items() if byte != END_BYTE} | {END_TEXT: END_BYTE}
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        special = [{"id": END_BYTE, "content": END_TEXT, **flags, "special": True}]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return json.dumps(
        {
            "version": "1.0",
            "added_tokens": special,
            "pre_tokenizer": byte_level,
            "decoder": byte_level,
            "model": {"type": "BPE", "vocab": vocab, "merges": []},
        },
        indent=1,
    )


BYTES = TextTokenizer(text=byte_tokenizer_json(), vocab_size=NUM_BYTES)
BYTES_THAT_END = TextTokenizer(text=byte_tokenizer_json(ends=True), vocab_size=NUM_BYTES, end=END_BYTE)


def load_tokenizer(path: AnyPath, vocab_size: int) -> TextTokenizer:
    """Load a tokenizer.json, and require that its tokens are in the vocabulary of the model."""
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise ValueError(
            "reading a tokenizer.json needs the tokenizers package: pip install 'raggedmoe[text]'; or train on bytes "
            "(no tokenizer)"
        ) from None
    if not path.is_file():
        raise ValueError(f"{path}: expected a tokenizer.json, found no file there")
    text = _read_text(path)
    if text in (BYTES.text, BYTES_THAT_END.text):  # as a model of bytes has it, which needs no library
        return BYTES_THAT_END
    try:
        tokenizer = Tokenizer.from_str(text)
    except Exception as error:  # the library raises the bare Exception for a file that it cannot read
        raise ValueError(f"{path}: expected a tokenizer of the tokenizers package, got {error}") from None
    largest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
    if largest < 0:
        raise ValueError(f"{path}: expected a tokenizer with tokens, got an empty vocabulary")
    if largest >= vocab_size:
        raise ValueError(
            f"{path}: expected token numbers below the model's vocabulary of {vocab_size}, got one of {largest}; use "
            f"vocab_size={largest + 1} or more, for a model with new parameters, or the tokenizer that belongs to it"
        )
    # A file may ask for these; both would falsify the documents.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return TextTokenizer(text=text, vocab_size=largest + 1, library=tokenizer, path=path)


def _find_end(path: AnyPath, tokenizer: Any) -> int | None:
    """Find the token that ends a text, in the files beside a tokenizer.json or by its usual names."""
    for name in (TOKENIZER_CONFIG, SPECIAL_TOKENS):
        tokenizer_config = read_json_object(path.parent / name) if (path.parent / name).is_file() else {}
        token = tokenizer_config.get("eos_token")
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str) and tokenizer.token_to_id(text) is not None:
            return tokenizer.token_to_id(text)
    for name in (GENERATION, CONFIG, KEPT_CONFIG):
        settings = read_json_object(path.parent / name) if (path.parent / name).is_file() else {}
        tokens = settings.get("eos_token_id")
        first = tokens[0] if isinstance(tokens, list) and tokens else tokens
        if type(first) is int and tokenizer.id_to_token(first) is not None:
            return first
    return next((end for end in map(tokenizer.token_to_id, USUAL_ENDS) if end is not None), None)


def _read_text(path: AnyPath) -> str:
    try:
        return _decode_utf8(path, path.read_bytes())
    except OSError as error:
        raise ValueError(f"{path}: expected to read it, got {error.strerror}; mend it or name another") from None


def _decode_utf8(path: AnyPath, content: bytes) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path}: expected UTF-8, which a tokenizer needs, got {content[error.start]:#04x} at byte {error.start}; "
            "convert the file, leave it out, or train on bytes (no tokenizer)"
        ) from None


def text_parts(text: str) -> Iterator[str]:
    """Split a long text at line ends."""
    start = 0
    while cut := _LINE_END.search(text, start + _PART_CHARACTERS):
        yield text[start : cut.start()]
        start = cut.start()
    yield text[start:]


def _batch_parts(parts: Sequence[tuple[int, str]]) -> Iterator[list[tuple[int, str]]]:
    """Group parts into batches, each long enough for one call of the tokenizer."""
    call, size = [], 0
    for number, part in parts:
        call.append((number, part))
        size += len(part)
        if size >= CALL_CHARACTERS:
            yield call
            call, size = [], 0
    if call:
        yield call
