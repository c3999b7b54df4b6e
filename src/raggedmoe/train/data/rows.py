"""Rows of tokens, each made from its number alone, so that a shuffled or resumed order needs no history."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np
from jaxtyping import Bool, Int, Integer

CYCLE = 1024  # tokens that a synthetic row walks through
SPANS_AT_ONCE = 2**16  # that are looked at, which takes some MB
JUMP = 8  # one synthetic token in this many goes somewhere else


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Batch:
    """The sequences of one step as arrays [B S]: NumPy's int32 at first, or whatever a tree map makes of them."""

    ids: Any
    targets: Any  # the next token of the same document; 0 where there is none
    segments: Any  # the document's number in the row: 0, 1, ...; -1 is padding
    positions: Any  # positions for rope, which start at 0 in every segment
    weights: Any  # float32: 1 where there is a target to learn, 0 at a document's last token and at padding


@runtime_checkable
class Rows(Protocol):
    """A dataset of numbered rows, of which any can be put into a batch."""

    @property
    def num_rows(self) -> int: ...

    def batch(self, rows: Sequence[int]) -> Batch: ...


@runtime_checkable
class Spans(Protocol):
    """Where each of many rows begins in an array of tokens, and how many it has."""

    def __len__(self) -> int: ...

    def of(self, rows: Int[np.ndarray, " B"]) -> tuple[Int[np.ndarray, " B"], Int[np.ndarray, " B"]]: ...


@dataclass(frozen=True, kw_only=True)
class ListedSpans:
    """Spans of any length."""

    starts: Int[np.ndarray, " rows"]
    lengths: Int[np.ndarray, " rows"]

    def __len__(self) -> int:
        return len(self.starts)

    def of(self, rows: Int[np.ndarray, " B"]) -> tuple[Int[np.ndarray, " B"], Int[np.ndarray, " B"]]:
        """Look up the spans of rows."""
        return self.starts[rows], self.lengths[rows]


@dataclass(frozen=True, kw_only=True)
class EqualSpans:
    """Spans that follow each other, of one length but for the last: they are computed, and take no memory."""

    num_tokens: int
    length: int
    left_out: Int[np.ndarray, " _"]  # numbers of spans that are no rows, in order

    def __len__(self) -> int:
        return -(-self.num_tokens // self.length) - len(self.left_out)

    def of(self, rows: Int[np.ndarray, " B"]) -> tuple[Int[np.ndarray, " B"], Int[np.ndarray, " B"]]:
        """Compute the spans of rows."""
        num_before = np.searchsorted(self.left_out - np.arange(len(self.left_out)), rows, side="right")
        starts = (rows + num_before) * self.length
        return starts, np.minimum(self.length, self.num_tokens - starts)


@dataclass(frozen=True, kw_only=True)
class TokenRows:
    """The rows of a corpus: its documents in one array, and the span of that array that each row holds.

    With packing the spans cover the array without a gap; without it none crosses the end of a document.
    """

    tokens: Integer[np.ndarray, " N"]
    bounds: Int[np.ndarray, " bounds"]  # where each document begins, and at last N
    spans: Spans
    sequence_length: int
    is_target: Bool[np.ndarray, " N"] | None = None  # the tokens that are learned; None: all that can be
    release: Callable[[], None] | None = None  # gives back what of mapped tokens was read; None: they are in memory

    @property
    def num_rows(self) -> int:
        return len(self.spans)

    def batch(self, rows: Sequence[int]) -> Batch:
        starts, lengths = self.spans.of(np.asarray(rows, np.int64))
        # One position more than a row has, for its last target.
        places = np.arange(self.sequence_length + 1, dtype=np.int32)
        tokens = self.tokens.take(starts[:, None] + places, mode="clip").astype(np.int32)
        if self.release is not None:
            self.release()
        begins = self._begins(starts)
        present = places[:-1] < lengths[:, None]
        learned = present & ~begins[:, 1:]
        if self.is_target is not None:
            learned &= self.is_target.take(starts[:, None] + places[1:], mode="clip")
        segment_start = np.maximum.accumulate(np.where(begins, places, 0)[:, :-1], axis=1)
        return Batch(
            ids=np.where(present, tokens[:, :-1], 0),
            targets=np.where(learned, tokens[:, 1:], 0),
            segments=np.where(present, np.cumsum(begins[:, :-1], axis=1, dtype=np.int32), np.int32(-1)),
            positions=np.where(present, places[:-1] - segment_start, 0),
            weights=learned.astype(np.float32),
        )

    def _begins(self, starts: Int[np.ndarray, " B"]) -> Bool[np.ndarray, "B places"]:
        """Mark where in each row another document begins. The end of the array counts as a beginning."""
        first = np.searchsorted(self.bounds, starts, side="right")
        num = np.searchsorted(self.bounds, starts + self.sequence_length, side="right") - first
        row = np.repeat(np.arange(len(starts)), num)
        document = np.arange(len(row)) + np.repeat(first - np.cumsum(num) + num, num)
        begins = np.zeros((len(starts), self.sequence_length + 1), bool)
        begins[row, self.bounds[document] - starts[row]] = True
        return begins


def token_rows(documents: Sequence[np.ndarray], *, sequence_length: int, packing: bool) -> TokenRows:
    """Cut documents, none of them empty, into rows. A row without a target (no two tokens of a document) is left out.

    What a document ends with is its own last token: nothing is put between documents here.
    """
    bounds = np.cumsum([0, *map(len, documents)])
    return rows_between(np.concatenate(documents), bounds, sequence_length=sequence_length, packing=packing)


def rows_between(
    tokens: np.ndarray,
    bounds: np.ndarray,
    *,
    sequence_length: int,
    packing: bool,
    release: Callable[[], None] | None = None,
) -> TokenRows:
    """Cut an array of documents, whose bounds are given, into rows, as `token_rows` does. Its tokens are not read."""
    spans = _equal_spans(bounds, sequence_length) if packing else _spans_of_documents(bounds, sequence_length)
    return TokenRows(tokens=tokens, bounds=bounds, spans=spans, sequence_length=sequence_length, release=release)


def _equal_spans(bounds: np.ndarray, sequence_length: int) -> EqualSpans:
    """Cut all tokens into spans, and find those without a target, some at a time: there may be millions."""
    num_tokens = int(bounds[-1])
    left_out = [np.zeros(0, np.int64)]
    for first in range(0, -(-num_tokens // sequence_length), SPANS_AT_ONCE):
        starts = np.arange(first * sequence_length, num_tokens, sequence_length)[:SPANS_AT_ONCE]
        ends = np.minimum(starts + sequence_length, num_tokens)
        left_out.append(first + np.flatnonzero(~_have_target(bounds, starts, ends)))
    return EqualSpans(num_tokens=num_tokens, length=sequence_length, left_out=np.concatenate(left_out))


def _spans_of_documents(bounds: np.ndarray, sequence_length: int) -> ListedSpans:
    """Cut each document into spans of its own."""
    num = -(-np.diff(bounds) // sequence_length)
    piece = np.arange(num.sum()) - np.repeat(np.cumsum(num) - num, num)
    starts = np.repeat(bounds[:-1], num) + piece * sequence_length
    ends = np.minimum(starts + sequence_length, np.repeat(bounds[1:], num))
    kept = _have_target(bounds, starts, ends)
    return ListedSpans(starts=starts[kept], lengths=(ends - starts)[kept])


def _have_target(bounds: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Tell which spans have a token that another of its document follows."""
    num_last_tokens = np.searchsorted(bounds[1:], ends, side="right") - np.searchsorted(
        bounds[1:], starts, side="right"
    )
    return ends - starts > num_last_tokens


def whole_document_rows(
    documents: Sequence[np.ndarray], learned: Sequence[np.ndarray], *, sequence_length: int, packing: bool
) -> TokenRows:
    """Put documents, none longer than a row and each with a token to learn, into rows without cutting any.

    With packing a row takes documents one after the other as long as they fit.
    """
    sizes = np.asarray([len(document) for document in documents])
    bounds = np.concatenate([[0], np.cumsum(sizes)])
    firsts, used = [0], 0
    for number, size in enumerate(sizes):
        if number and (not packing or used + size > sequence_length):
            firsts.append(number)
            used = 0
        used += size
    starts = bounds[firsts]
    return TokenRows(
        tokens=np.concatenate(documents),
        bounds=bounds,
        spans=ListedSpans(starts=starts, lengths=np.diff([*starts, bounds[-1]])),
        sequence_length=sequence_length,
        is_target=np.concatenate(learned),
    )


@dataclass(frozen=True, kw_only=True)
class SyntheticRows:
    """Synthetic rows that walk around one fixed random cycle of tokens, with jumps, so that there is a known best loss.

    The next token is the cycle's next, or after a jump (one token in 8) any of the cycle. So the loss falls from the
    logarithm of the vocabulary to that of the cycle's size, 6.93, and then towards 1.24 for 1024 tokens.
    """

    cycle: Int[np.ndarray, " C"]
    key: int  # rows of other keys have nothing in common but the cycle
    sequence_length: int

    @property
    def num_rows(self) -> int:
        return 2**31  # as good as endless, and what grain can shuffle

    def batch(self, rows: Sequence[int]) -> Batch:
        places = np.arange(self.sequence_length + 1)
        counters = np.asarray(rows)[:, None] * (self.sequence_length + 1) + places
        bits = _mix_bits(counters.astype(np.uint64), self.key)
        jumps = bits % np.uint64(JUMP) == 0
        jumps[:, 0] = True
        landed = ((bits >> np.uint64(32)) % np.uint64(len(self.cycle))).astype(np.int64)
        jumped = np.maximum.accumulate(np.where(jumps, places, 0), axis=1)
        walk = np.take_along_axis(landed, jumped, axis=1) + places - jumped
        tokens = self.cycle[walk % len(self.cycle)].astype(np.int32)
        shape = tokens[:, 1:].shape
        return Batch(
            ids=tokens[:, :-1],
            targets=tokens[:, 1:],
            segments=np.zeros(shape, np.int32),
            positions=np.broadcast_to(places[:-1].astype(np.int32), shape).copy(),
            weights=np.ones(shape, np.float32),
        )


def synthetic_rows(*, vocab_size: int, sequence_length: int, seed: int, key: int) -> SyntheticRows:
    """Make synthetic rows of tokens below ``vocab_size``. The seed draws the cycle, the key the walks."""
    chosen = np.random.default_rng(seed).permutation(vocab_size)[:CYCLE]
    return SyntheticRows(cycle=chosen, key=key, sequence_length=sequence_length)


def _mix_bits(counters: np.ndarray, key: int) -> np.ndarray:
    """Hash each counter to 64 random bits; a NumPy generator for each row would cost more than the row's tokens.

    Multiplications by odd numbers and shifts lose nothing, so two counters of one key never share their bits.
    """
    bits = counters + np.uint64(key)
    for shift, factor in ((32, 0x9E3779B97F4A7C15), (29, 0xD1B54A32D192ED03), (32, 0x8CB92BA72F3D8DD7)):
        bits = (bits ^ (bits >> np.uint64(shift))) * np.uint64(factor)
    return bits ^ (bits >> np.uint64(32))
