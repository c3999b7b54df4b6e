"""The sets that a run is evaluated on beside what it holds out of its own data: ``eval_paths=code=PATH,news=PATH``."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from raggedmoe.storage import as_path
from raggedmoe.train.data.readers import READERS, digest_of, list_places, make_rows, update_digest
from raggedmoe.train.data.rows import Rows, TokenRows, rows_between
from raggedmoe.train.data.token_files import TokenFile, TokenFolder, open_tokens
from raggedmoe.train.data.tokenizer import TextTokenizer
from raggedmoe.train.settings.sections import DataConfig


@dataclass(frozen=True, kw_only=True)
class NamedSets:
    """Sets to evaluate on by name; by default there are none."""

    rows: Mapping[str, Rows] = field(default_factory=dict)
    fingerprint: str = ""  # hash of the content of all; empty without any, so that runs from before there were go on


def read_named_sets(config: DataConfig, tokenizer: TextTokenizer) -> NamedSets:
    """Read sets of files, which are of the kind of those to train on; beside Python's sources they are texts.

    A file that is trained on is refused: its loss says what was learned by heart.
    """
    if not config.eval_paths:
        return NamedSets()
    dataset = "text" if config.dataset == "stdlib" else config.dataset
    rows, digest = {}, digest_of(["evaluated"])
    # The split that is named is that of the files to train on.
    of_sets = replace(config, dataset_split=None)
    trained = list_places(config, config.dataset, config.dataset_path)
    for name, paths in config.named_eval_paths.items():
        shared = sorted(trained & list_places(of_sets, dataset, paths))
        if shared:
            reads = "dataset_type=stdlib" if config.dataset == "stdlib" else "dataset_path"
            instead = "the files of another split" if config.dataset == "hf" else "other files"
            raise ValueError(
                f"eval_paths={name}={','.join(paths)}: expected files that are not trained on, got {shared[0]}, which "
                f"{reads} reads as well; name {instead}"
            )
        documents = READERS[dataset](of_sets, paths, tokenizer).documents
        digest.update(digest_of([name]).digest())
        update_digest(digest, documents)
        rows[name] = _checked(name, make_rows(config, documents))
    return NamedSets(rows=rows, fingerprint=digest.hexdigest())


def open_named_sets(config: DataConfig, trained: TokenFolder, vocab_size: int) -> NamedSets:
    """Open sets that are folders of tokens: of each the part that is held out, or all where none is.

    The part to train on, in this folder or in a copy of it, is refused.
    """
    rows, digest = {}, digest_of(["evaluated"])
    for name, paths in config.named_eval_paths.items():
        if len(paths) > 1:
            raise ValueError(f"eval_paths: expected one folder of tokens as {name}, got {', '.join(paths)}")
        folder = open_tokens(as_path(paths[0]), vocab_size)
        if folder.tokenizer.text != trained.tokenizer.text:
            raise ValueError(
                f"eval_paths={name}={paths[0]}: expected tokens of the tokenizer that made those to train on, got "
                f"another's; tokenize with --tokenizer {config.dataset_path[0]}"
            )
        evaluated = folder.train if folder.held_out is None else folder.held_out
        if evaluated.digest == trained.train.digest:
            raise ValueError(
                f"eval_paths={name}={paths[0]}: expected tokens that are not trained on, got those of "
                f"dataset_path={config.dataset_path[0]}; tokenize with a part that is held out, or name another folder"
            )
        digest.update(digest_of([name, folder.fingerprint]).digest())
        rows[name] = _checked(name, rows_of_file(config, evaluated))
    return NamedSets(rows=rows, fingerprint=digest.hexdigest()) if rows else NamedSets()


def rows_of_file(config: DataConfig, part: TokenFile) -> TokenRows:
    """Cut a part of a folder of tokens into rows."""
    length, packing = config.sequence_length, config.packing
    return rows_between(part.tokens, part.bounds, sequence_length=length, packing=packing, release=part.release)


def _checked(name: str, rows: TokenRows) -> TokenRows:
    if not rows.num_rows:
        raise ValueError(f"eval_paths: expected documents of two tokens or more as {name}, got none; name other files")
    return rows
