"""Reading a dataset of Hugging Face on this machine or in an object store: the rows of parquet and arrow files.

A dataset that `datasets` saved (`save_to_disk`) has arrow files, in a folder for each split if it has several. One that
was downloaded has parquet files, whose names or folders say of which split they are.
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from raggedmoe.storage import AnyPath, as_path
from raggedmoe.train.data import chat
from raggedmoe.train.data.chat_template import RenderedChat
from raggedmoe.train.data.corpus import Corpus, Files, list_files_below, make_corpus, real_place
from raggedmoe.train.data.tokenizer import TextTokenizer
from raggedmoe.train.settings.sections import DataConfig

SUFFIXES = (".parquet", ".arrow")
PARQUET, INDEXED = b"PAR1", b"ARROW1"  # with which a parquet file begins, and an arrow file that is no stream
DEFAULT_SPLIT = "train"
KNOWN_SPLITS = ("train", "training", "test", "testing", "eval", "evaluation", "validation", "valid", "val", "dev")
TEXT, MESSAGES, PROMPT, COMPLETION, TOOLS = "text", "messages", "prompt", "completion", "tools"
ROWS = 1000  # that are read at once
_SHARD = re.compile(r"[-_.]?\d+-of-\d+.*$")
_WORD_END = re.compile(r"[-_.]")
_NUMBER = re.compile(r"[-_.]?\d+$")
COMPUTED = ("cache-", "indices")  # with which the names begin of what `datasets` computed from a dataset
_UNNAMED = ("", "data", "part", "shard")  # what shards are called whose folder says the rest


def read_dataset(
    paths: Sequence[str], split: str | None, column: str | None
) -> Iterator[tuple[str, AnyPath, dict[str, Any]]]:
    """Yield the rows of datasets with their names and places: the files of a split, and those that are named."""
    for name, path in find_tables(paths, split).values():
        for number, row in enumerate(read_rows(path, column), 1):
            yield f"{name}:{number}", path, row


def find_tables(paths: Sequence[str], split: str | None) -> dict[str, tuple[str, AnyPath]]:
    """Find the files of datasets, by their real places, with their names.

    Each is found once, by whatever paths and links: a row that is read twice could be trained on and held out.
    """
    roots = [as_path(path) for path in paths]
    tables = [file for root in roots for file in select_tables(root, list_files_below(root, SUFFIXES), split)]
    return {real_place(path): (name, path) for name, path in reversed(tables)}


def read_hf_files(config: DataConfig, paths: Sequence[str], tokenizer: TextTokenizer) -> Corpus:
    """Read each row of datasets as one document, a text or a conversation."""
    texts: list[tuple[str, AnyPath, bytes]] = []
    chats: list[tuple[str, RenderedChat]] = []
    template = None
    for name, path, row in read_dataset(paths, config.dataset_split, config.dataset_column):
        if TEXT in row:
            texts.append((name, path, (row[TEXT] or "").encode()))
            continue
        template = template or chat.read_template(tokenizer, config.chat_date)
        try:
            chats.append((name, chat.render_chat(row, template)))
        except ValueError as error:
            raise ValueError(f"{path}, row {name.rpartition(':')[2]}: {error}") from None
    where = ", ".join(paths)
    if texts and chats:
        raise ValueError(f"{where}: expected texts, or conversations, got files of both; name one kind of them")
    if chats:
        return chat.make_chat_corpus(chats, where, tokenizer, config.sequence_length)
    if not any(content for _, _, content in texts):
        raise ValueError(f"{where}: expected text, got {len(texts)} empty rows; name other files")
    return make_corpus(texts, tokenizer, kind="row")


def select_tables(root: AnyPath, files: Files, split: str | None) -> Files:
    """Leave out, of the files below a folder, those of other splits, and what `datasets` computed and keeps there."""
    if root.is_file():
        return files
    tables = [(name, path) for name, path in files if name.lower().endswith(SUFFIXES)]
    kept = [(name, path) for name, path in tables if not name.rpartition("/")[2].startswith(COMPUTED)]
    if not kept:
        return [file for file in files if file not in tables]
    chosen = _select_split(kept, split, root)
    return [file for file in files if file not in tables or file in chosen]


def _select_split(files: Files, split: str | None, where: AnyPath) -> Files:
    """Return the files of a split: of the one that is named, or of train; all where names tell no splits apart."""
    labels = {name: split_of(name) for name, _ in files}
    known = sorted({label for label in labels.values() if label is not None})
    if split is None and not any(_WORD_END.split(label)[0] in KNOWN_SPLITS for label in known):
        return list(files)
    wanted = split or (known[0] if len(known) == 1 else DEFAULT_SPLIT)
    chosen = [(name, path) for name, path in files if labels[name] == wanted]
    if not chosen:
        raise ValueError(
            f"{where}: expected files of the split {wanted!r}, got those of {', '.join(known) or 'no split'}; use "
            f"dataset_split=..., or name the files themselves"
        )
    return chosen


def split_of(name: str) -> str | None:
    """Return the split that a file's name or folder says; None: neither says any.

    >>> split_of("data/train_sft-00000-of-00003.parquet"), split_of("validation/data-00000-of-00001.arrow")
    ('train_sft', 'validation')
    >>> split_of("default/test/0000.parquet"), split_of("data-00000-of-00001.arrow")
    ('test', None)
    """
    folder, _, file = name.rpartition("/")
    stem = _NUMBER.sub("", _SHARD.sub("", file.rpartition(".")[0]))
    label = folder.rpartition("/")[2] if stem in _UNNAMED else stem
    return label if label not in _UNNAMED else None


def read_rows(path: AnyPath, column: str | None) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file, a thousand at a time from the disk: ``{"text": …}``, or a conversation as jsonl has it.

    ``column`` is the one of text or messages; None: what it is usually called.
    """
    number = 0
    for columns, rows in _read_batches(path, column):
        for values in rows:
            number += 1
            row = {kind: values[name] for kind, name in columns.items()}
            if TEXT in row and isinstance(row[TEXT], list):
                row[MESSAGES] = row.pop(TEXT)
            elif TEXT in row:
                row.pop(TOOLS, None)  # which are of conversations
            if TEXT in row and not isinstance(row[TEXT], str | None):
                raise ValueError(f"{path}, row {number}: expected text, or a list of messages, got {row[TEXT]!r:.80}")
            yield row


def _columns(path: AnyPath, names: Sequence[str], column: str | None) -> dict[str, str]:
    """Find the columns to read: what each is, and its name."""
    if column is not None:
        if column not in names:
            raise ValueError(f"{path}: expected a column {column}, got {', '.join(names)}; see dataset_column")
        return {TEXT: column, TOOLS: TOOLS} if TOOLS in names and column != TOOLS else {TEXT: column}
    for kinds in ((MESSAGES,), (PROMPT, COMPLETION), (TEXT,)):
        if all(kind in names for kind in kinds):
            read = kinds if TEXT in kinds or TOOLS not in names else (*kinds, TOOLS)
            return {kind: kind for kind in read}
    raise ValueError(
        f"{path}: expected a column {TEXT}, {MESSAGES}, or {PROMPT} and {COMPLETION}, got {', '.join(names)}; name the "
        "one of text or of messages with dataset_column=..."
    )


def _read_batches(path: AnyPath, column: str | None) -> Iterator[tuple[dict[str, str], list[dict[str, Any]]]]:
    """Yield a file's rows in parts, with the columns that they have."""
    try:
        import pyarrow as pa
        import pyarrow.parquet
    except ImportError:
        raise ValueError("reading parquet and arrow files needs pyarrow: pip install 'raggedmoe[hf]'") from None
    try:
        with _open(pa, path) as source:
            begin = source.read(len(INDEXED))
            source.seek(0)
            if begin.startswith(PARQUET):
                file = pyarrow.parquet.ParquetFile(source)
                columns = _columns(path, file.schema_arrow.names, column)
                for batch in file.iter_batches(batch_size=ROWS, columns=list(columns.values())):
                    yield columns, batch.to_pylist()
            else:
                schema, batches = _open_arrow(pa, source, begin == INDEXED)
                columns = _columns(path, schema.names, column)
                for batch in batches:
                    for start in range(0, batch.num_rows, ROWS):
                        yield columns, batch.select(list(columns.values())).slice(start, ROWS).to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path}: expected a parquet or an arrow file, got: {error}; is the copy complete?") from None


def _open(pa: Any, path: AnyPath) -> Any:
    """Open a file for reading, without mapping it: what was read of a map would count as memory of the process."""
    return pa.OSFile(str(path)) if isinstance(path, Path) else pa.BufferReader(path.read_bytes())


def _open_arrow(pa: Any, source: Any, is_indexed: bool) -> tuple[Any, Iterator[Any]]:
    """Open an arrow file: a stream, as `datasets` writes it, or a file with an index at its end."""
    if not is_indexed:
        reader = pa.ipc.open_stream(source)
        return reader.schema, iter(reader)
    reader = pa.ipc.open_file(source)
    return reader.schema, (reader.get_batch(number) for number in range(reader.num_record_batches))
