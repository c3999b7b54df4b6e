"""`raggedmoe generate`, which continues a text with a checkpoint's model."""

import time
from collections.abc import Iterator
from typing import Any

import tyro
from rich.console import Console

from raggedmoe.interop.json_file import read_json_object
from raggedmoe.kernels.arrays import FLOATS
from raggedmoe.models import generate as generation
from raggedmoe.models.generate import Sampling
from raggedmoe.names import unknown
from raggedmoe.storage import AnyPath
from raggedmoe.train.loop.saved_run import find_model


def generate(
    path: tyro.conf.Positional[str],
    prompt: str,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    dtype: str | None = None,
    keep_quantised: bool = False,
    ids: bool = False,
) -> int:
    """Generate text that continues a prompt, and print each token as it comes.

    The folder is a Hugging Face one, or one that `raggedmoe import` or a run wrote, with its tokenizer.json; or that of
    a run, whose trained model is taken, or else its newest checkpoint. Decoding is greedy by default, and samples with
    a temperature. It ends at the end-of-sequence token that the folder names.

      raggedmoe generate out/demo@300 --prompt "def "

    Args:
        path: the model's folder; a run's folder RUN; or one of its checkpoints, RUN@STEP; here or in an object store
            (s3://bucket/folder).
        prompt: the text to continue; with --ids, token numbers separated by commas or spaces.
        max_new_tokens: the largest number of tokens to generate.
        temperature: 0 takes the most likely token; larger is more random.
        top_k: sample among this many most likely tokens only.
        top_p: sample among the most likely tokens that together have this probability only.
        seed: seed of the sampling.
        dtype: type of activations; by default that of the weights.
        keep_quantised: leave matrices in the fp8, int8 or mxfp4 that the folder has, instead of widening them.
        ids: the prompt and the output are token numbers, so no tokenizer is needed.
    """
    if dtype is not None and dtype not in FLOATS:
        raise unknown("dtype", dtype, FLOATS)
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
    saved = find_model(path)
    tokenizer: Any = None if ids else _tokenizer(saved.folder)
    numbers = _numbers(prompt) if ids else tokenizer.encode(prompt).ids
    model = saved.load(dtype=dtype, keep_quantised=keep_quantised, progress=True)
    start = time.perf_counter()
    tokens = (
        token
        for (token,) in generation.generate(
            model,
            [numbers],
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            stop=_end_tokens(saved.folder),
            seed=seed,
        )
        if token is not None
    )
    count = 0
    pieces = (f"{token} " for token in tokens) if ids else _text(tokenizer, tokens)
    for piece in pieces:
        count += 1
        print(piece, end="", flush=True)
    print(flush=True)  # before the next line, which goes to standard error
    seconds = time.perf_counter() - start
    Console(stderr=True).print(f"[dim]{count} tokens in {seconds:.1f} s, compilation included[/]", highlight=False)
    return 0


def _numbers(prompt: str) -> list[int]:
    parts = prompt.replace(",", " ").split()
    if not parts or not all(part.isdigit() for part in parts):
        raise ValueError(f"expected token numbers such as '12,7,99' with --ids, got {prompt!r}")
    return [int(part) for part in parts]


def _tokenizer(folder: AnyPath) -> Any:
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise ValueError(
            "reading a tokenizer.json needs the tokenizers package: pip install 'raggedmoe[text]'; or give token "
            "numbers with --ids"
        ) from None
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ValueError(f"{path}: expected the model's tokenizer, found none; put it there, or use --ids")
    try:
        return Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except Exception as error:  # the library raises the bare Exception for a file that it cannot read
        raise ValueError(f"{path}: expected a tokenizer of the tokenizers package, got {error}") from None


def _end_tokens(folder: AnyPath) -> list[int]:
    """Read the end-of-sequence tokens that a folder's JSON files name."""
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        if path.is_file():
            end_tokens = read_json_object(path).get("eos_token_id")
            if end_tokens is None:
                continue
            tokens = end_tokens if isinstance(end_tokens, list) else [end_tokens]
            if not all(type(token) is int for token in tokens):
                raise ValueError(
                    f"{path}: expected eos_token_id to be a token number or a list of them, got {end_tokens!r}"
                )
            return tokens
    return []


def _text(tokenizer: Any, tokens: Iterator[int]) -> Iterator[str]:
    """Yield what each token adds to the text. An incomplete character is held back until the rest of it comes."""
    ids: list[int] = []
    shown = ""
    for token in tokens:
        ids.append(token)
        whole = tokenizer.decode(ids).rstrip("\N{REPLACEMENT CHARACTER}")
        yield whole.removeprefix(shown)
        shown = whole
