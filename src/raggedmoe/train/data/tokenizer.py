"""From text to tokens: as bytes, or through a tokenizer.json."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from raggedmoe.interop.companions import GENERATION, as_json, read_companions
from raggedmoe.interop.progress import bytes_bar
from raggedmoe.models.companions import Companions
from raggedmoe.storage import AnyPath

NUM_BYTES = 256
TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
# The tokenizer takes about 150 bytes of memory a character while it works, and one core a text: so long texts are split
# into parts of this many characters, and it gets parts of this many characters in a call.
_PART_CHARACTERS = 2**18
_CALL_CHARACTERS = 2**21
# Tokenizers cut here anyway, so a part's tokens are those that the whole text would have there.
_LINE_END = re.compile(r"(?<=[^\W_])(?=\n)")


@dataclass(frozen=True, kw_only=True)
class TextTokenizer:
    """What makes tokens of text. Without a tokenizer of the tokenizers package, they are its bytes."""

    text: str  # its tokenizer.json
    vocab_size: int  # one more than its largest token
    library: Any = None  # the tokenizer of the tokenizers package
    path: AnyPath | None = None  # of its tokenizer.json

    @property
    def unit(self) -> str:
        """What a token is called."""
        return "bytes" if self.library is None else "tokens"

    def encode(self, contents: Sequence[tuple[AnyPath, bytes]]) -> list[np.ndarray]:
        """Return the tokens of each file's content, without the special tokens that there are around a prompt."""
        if self.library is None:
            return [np.frombuffer(content, np.uint8) for _, content in contents]
        return self._tokenize([_decode_utf8(path, content) for path, content in contents])

    def with_companions(self, of_model: Companions, folder: AnyPath | None) -> Companions:
        """Return a model's companions with this tokenizer, and with the files that belong to it.

        If it is the one of the model's own ``folder``, they are those of the model. Otherwise the files beside it take
        the place of all that the model has of its old tokenizer.
        """
        files = dict(of_model.files)
        config_json = dict(of_model.config_json)
        if self.path is None or folder is None or self.path.parent.absolute() != folder.absolute():
            generation = _without_tokens(json.loads(files.get(GENERATION, b"{}")))
            files = {name: content for name, content in files.items() if name.startswith(("LICENSE", "NOTICE"))}
            files |= {GENERATION: as_json(generation)} if generation else {}
            config_json = _without_tokens(config_json)
            files |= {} if self.path is None else read_companions(self.path.parent).files
            files.setdefault(TOKENIZER_CONFIG, as_json(self._minimal_config()))
        files[TOKENIZER] = self.text.encode()
        return Companions(files=files, config_json=config_json)

    def _minimal_config(self) -> dict[str, Any]:
        """Make a tokenizer_config.json that has transformers take the tokenizer.json as it is."""
        return {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}

    def _tokenize(self, texts: Sequence[str]) -> list[np.ndarray]:
        dtype = np.uint16 if self.vocab_size <= 2**16 else np.uint32
        text_arrays: list[list[np.ndarray]] = [[np.zeros(0, dtype)] for _ in texts]
        parts = [(number, part) for number, text in enumerate(texts) for part in _split_text(text)]
        with bytes_bar("tokenizing", sum(map(len, texts)), shown=True) as advance:
            for call in _batch_parts(parts):
                encodings = self.library.encode_batch_fast([part for _, part in call], add_special_tokens=False)
                for (number, _), encoding in zip(call, encodings):
                    text_arrays[number].append(np.asarray(encoding.ids, dtype))
                advance(sum(len(part) for _, part in call))
        return [np.concatenate(arrays) for arrays in text_arrays]


def _without_tokens(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings without the numbers of a tokenizer's tokens."""
    return {key: value for key, value in settings.items() if not key.endswith(("_token_id", "_token_ids"))}


def byte_tokenizer_json() -> str:
    """Make a tokenizer.json whose tokens are the 256 bytes of UTF-8, without merges; a token's number is its byte."""
    # The format writes a byte as a character that can be seen: itself where Latin-1 shows one, or else the next free
    # character from 256 on.
    shown = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    stand_ins = iter(range(256, 512))
    vocab = {chr(byte if byte in shown else next(stand_ins)): byte for byte in range(NUM_BYTES)}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return json.dumps(
        {
            "version": "1.0",
            "added_tokens": [],
            "pre_tokenizer": byte_level,
            "decoder": byte_level,
            "model": {"type": "BPE", "vocab": vocab, "merges": []},
        },
        indent=1,
    )


BYTES = TextTokenizer(text=byte_tokenizer_json(), vocab_size=NUM_BYTES)


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
    if text == BYTES.text:  # as a model of bytes has it, which needs no library
        return BYTES
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


def _split_text(text: str) -> Iterator[str]:
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
        if size >= _CALL_CHARACTERS:
            yield call
            call, size = [], 0
    if call:
        yield call
