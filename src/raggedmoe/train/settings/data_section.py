"""The settings of a run's data: what it is trained and evaluated on, in which rows and order."""

import re
from datetime import date

from raggedmoe.train.settings.fields import Section, section_class, setting

BYTE_LENGTH, TOKENS_PER_DEVICE = 256, 4096  # of a sequence of bytes, and of a micro-batch
BYTES = "bytes"  # the tokenizer_path that says so
OF_FILES = ("text", "chat", "hf", "tokens")  # the datasets that are read from dataset_path
OF_CONVERSATIONS = ("chat", "hf")  # those that a chat template may write
HELD_OUT = "held-out"  # what the share of the data that is not trained on is called among sets to evaluate on
WITHOUT_TOKENIZER = ("tokens", "synthetic")  # the datasets that no tokenizer of the run makes


@section_class
class DataConfig(Section):
    """What to train on, and in which rows and order.

    The datasets: "stdlib" is the source code of the Python that runs, and needs no download. "text" is your own files.
    Both are read as bytes or through a tokenizer. "chat" is conversations, whose answers alone are learned. "hf" is a
    dataset of Hugging Face on this machine, of texts or of conversations. "synthetic" is random tokens with something
    to learn in them.
    """

    dataset_type: str | None = setting(
        default=None,
        otherwise="stdlib",
        help="Training data: Python's own sources (has to be asked for, unless the model is one of bytes), text files, "
        "conversations (jsonl), a dataset of Hugging Face (parquet, arrow), what `raggedmoe tokenize` wrote, or random "
        "tokens",
        choices=("stdlib", "text", "chat", "hf", "tokens", "synthetic"),
    )
    dataset_path: tuple[str, ...] = setting(
        default=(), help="Files or folders, separated by commas, for dataset_type=text, chat, hf, tokens"
    )
    dataset_split: str | None = setting(
        default=None, help="Split of dataset_type=hf, such as test; none: train, or all if there is none of that name"
    )
    dataset_column: str | None = setting(
        default=None,
        help="Column of text or of messages, for dataset_type=hf; none: messages, prompt and completion, or text",
    )
    dataset_suffixes: tuple[str, ...] = setting(
        default=(), help="Suffixes of the files to read in folders; none: the usual ones"
    )
    tokenizer_path: str | None = setting(
        default=None, help="A tokenizer.json; bytes: tokens are bytes; none: that of the model's folder, or else bytes"
    )
    add_eos: bool = setting(default=True, help="End each document with the end-of-text token, which a model learns")
    eos_token: str | None = setting(
        default=None, help="Text of the end-of-text token; none: what belongs to the tokenizer says; of bytes, 0xff"
    )
    chat_date: str | None = setting(
        default=None, help="Date, as 2026-05-31, that a chat template may ask for; none: the day on which the run began"
    )
    max_target_length: int | None = setting(
        default=None,
        help="Sequence length in tokens; none: 256 for models of bytes, else 2048 or the most that the model has",
        at_least=2,
    )
    per_device_batch_size: int | None = setting(
        default=None,
        help="Sequences per device in a micro-batch; none: 16, or 4096 tokens where max_target_length is none too",
        may_change=True,
        at_least=1,
    )
    packing: bool = setting(default=True, help="Pack several documents into a row; false: one per row, padded")
    held_out: float = setting(
        default=0.05, help="Share of the data that is held out for evaluation", at_least=0, at_most=0.5
    )
    eval_paths: tuple[str, ...] = setting(
        default=(),
        help="More data to evaluate on, as NAME=PATH,NAME=PATH, read as dataset_path is; each name has a loss",
    )
    data_seed: int = setting(default=0, help="Seed of the train/held-out split and of the shuffling")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dataset in OF_FILES and not self.dataset_path:
            raise ValueError(
                f"dataset_type={self.dataset}: expected dataset_path with files or folders, got none; give at least one"
            )
        if self.dataset == "tokens" and len(self.dataset_path) != 1:
            raise ValueError(f"dataset_type=tokens: expected one folder, got {','.join(self.dataset_path)}")
        unread = None
        if self.dataset in WITHOUT_TOKENIZER and self.tokenizer_path is not None:
            unread = f"tokenizer_path={self.tokenizer_path}"
        elif self.dataset not in OF_FILES and self.dataset_path:
            unread = f"dataset_path={','.join(self.dataset_path)}"
        if unread is not None:
            raise ValueError(f"dataset_type={self.dataset} reads no {unread}; leave it out, or use dataset_type=text")
        if not all(suffix.startswith(".") for suffix in self.dataset_suffixes):
            raise ValueError(f"expected dataset_suffixes such as .txt, got {','.join(self.dataset_suffixes)}")
        self._check_eval_paths()
        if self.chat_date is not None:
            try:
                date.fromisoformat(self.chat_date)
            except ValueError:
                raise ValueError(f"chat_date={self.chat_date}: expected a date such as 2026-05-31") from None

    @property
    def dataset(self) -> str:
        """What the data are made of: the type that was asked for, or else Python's own sources."""
        return self.value_of("dataset_type")

    def _check_eval_paths(self) -> None:
        for entry in self.eval_paths:
            name, _, path = entry.partition("=")
            if not re.fullmatch(r"[\w.-]+", name) or name == HELD_OUT or not path:
                raise ValueError(
                    f"eval_paths={','.join(self.eval_paths)}: expected NAME=PATH, with a name of letters and digits "
                    f"other than {HELD_OUT}, got {entry!r}"
                )
        if self.eval_paths and self.dataset == "synthetic":
            raise ValueError(
                f"dataset_type=synthetic reads no eval_paths={','.join(self.eval_paths)}; leave it out, or use "
                "dataset_type=text"
            )

    @property
    def named_eval_paths(self) -> dict[str, tuple[str, ...]]:
        """The files or folders of each set to evaluate on, by its name."""
        paths: dict[str, tuple[str, ...]] = {}
        for name, _, path in (entry.partition("=") for entry in self.eval_paths):
            paths[name] = (*paths.get(name, ()), path)
        return paths

    @property
    def holds_out(self) -> bool:
        """Whether there is anything to evaluate on."""
        return self.held_out > 0 or bool(self.eval_paths)

    @property
    def sequence_length(self) -> int:
        """Tokens of a sequence; without a model to follow, the demo's."""
        return BYTE_LENGTH if self.max_target_length is None else self.max_target_length

    @property
    def sequences_per_device(self) -> int:
        """Sequences that a device holds at once."""
        return TOKENS_PER_DEVICE // BYTE_LENGTH if self.per_device_batch_size is None else self.per_device_batch_size
