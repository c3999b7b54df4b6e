"""The sets that a run is evaluated on beside what it holds out of its own data: ``eval_paths=code=PATH,news=PATH``."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from raggedmoe.storage import as_path
from raggedmoe.train.data.hf_files import find_tables
from raggedmoe.train.data.readers import READERS, digest_of, make_rows, read_texts, update_digest
from raggedmoe.train.data.rows import Rows, TokenRows, rows_between
from raggedmoe.train.data.token_files import TokenFile, open_tokens
from raggedmoe.train.data.tokenizer import TextTokenizer
from raggedmoe.train.settings.sections import DataConfig


@dataclass(frozen=True, kw_only=True)
class NamedSets:
    """Sets to evaluate on by name; by default there are none."""

    rows: Mapping[str, Rows] = field(default_factory=dict)
    fingerprint: str = ""  # hash of the content of all; empty without any, so that runs from before there were go on


def read_named_sets(config: DataConfig, tokenizer: TextTokenizer) -> NamedSets:
    """Read sets of files, which are of the kind of those to train on; beside Python's sources they are texts."""
    reader = read_texts if config.dataset == "stdlib" else READERS[config.dataset]
    rows, digest = {}, digest_of(["evaluated"])
    # The split that is named is that of the files to train on.
    of_sets = replace(config, dataset_split=None)
    for name, paths in config.named_eval_paths.items():
        _check_apart(config, name, paths)
        documents = reader(of_sets, paths, tokenizer).documents
        digest.update(digest_of([name]).digest())
        update_digest(digest, documents)
        rows[name] = _checked(name, make_rows(config, documents))
    return NamedSets(rows=rows, fingerprint=digest.hexdigest()) if rows else NamedSets()


def open_named_sets(config: DataConfig, tokenizer: TextTokenizer, vocab_size: int) -> NamedSets:
    """Open sets that are folders of tokens: of each the part that is held out, or all where none is."""
    rows, digest = {}, digest_of(["evaluated"])
    for name, paths in config.named_eval_paths.items():
        if len(paths) > 1:
            raise ValueError(f"eval_paths: expected one folder of tokens as {name}, got {', '.join(paths)}")
        folder = open_tokens(as_path(paths[0]), vocab_size)
        if folder.tokenizer.text != tokenizer.text:
            raise ValueError(
                f"eval_paths={name}={paths[0]}: expected tokens of the tokenizer that made those to train on, got "
                f"another's; tokenize with --tokenizer {config.dataset_path[0]}"
            )
        digest.update(digest_of([name, folder.fingerprint]).digest())
        rows[name] = _checked(name, rows_of_file(config, folder.train if folder.held_out is None else folder.held_out))
    return NamedSets(rows=rows, fingerprint=digest.hexdigest()) if rows else NamedSets()


def rows_of_file(config: DataConfig, part: TokenFile) -> TokenRows:
    """Cut a part of a folder of tokens into rows."""
    length, packing = config.sequence_length, config.packing
    return rows_between(part.tokens, part.bounds, sequence_length=length, packing=packing, release=part.release)


def _check_apart(config: DataConfig, name: str, paths: Sequence[str]) -> None:
    """Refuse a set with a dataset's files that are trained on, as of a folder of which no other split is named."""
    if config.dataset != "hf":
        return
    trained = find_tables(config.dataset_path, config.dataset_split)
    shared = sorted(find_tables(paths, None).keys() & trained.keys())
    if shared:
        raise ValueError(
            f"eval_paths={name}={','.join(paths)}: expected files that are not trained on, got {shared[0]}, which "
            "dataset_path reads as well; name the files of another split"
        )


def _checked(name: str, rows: TokenRows) -> TokenRows:
    if not rows.num_rows:
        raise ValueError(f"eval_paths: expected documents of two tokens or more as {name}, got none; name other files")
    return rows
