"""Rows of tokens against plain loops over documents whose tokens are all different."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raggedmoe.train.data import rows as rows_module
from raggedmoe.train.data.rows import CYCLE, synthetic_rows, token_rows

S = 5
FIELDS = ("ids", "targets", "segments", "positions", "weights")
# What a row's length makes special, and anything.
lengths = st.lists(st.sampled_from([1, 2, S - 1, S, S + 1, 2 * S, 2 * S + 1]) | st.integers(1, 4 * S), min_size=1)


def distinct(lengths):
    """Documents in which no token occurs twice, and none is 0."""
    bounds = np.cumsum([1, *lengths])
    return [np.arange(start, end, dtype=np.uint16) for start, end in itertools.pairwise(bounds)]


def plain_row(pieces):
    """A row by the book, from pieces of (tokens, the token after them or None)."""
    row = []
    for segment, (tokens, after) in enumerate(pieces):
        for place, (token, target) in enumerate(zip(tokens, [*tokens[1:], after])):
            row.append((token, target or 0, segment, place, float(target is not None)))
    return row + [(0, 0, -1, 0, 0.0)] * (S - len(row))


def plain_rows(documents, packing):
    """All rows that have something to learn."""
    rows, pieces, room = [], [], S
    for tokens in (document.tolist() for document in documents):
        while tokens:
            pieces.append((tokens[:room], tokens[room] if len(tokens) > room else None))
            room, tokens = room - len(pieces[-1][0]), tokens[room:]
            if not room or not packing:
                rows.append(plain_row(pieces))
                pieces, room = [], S
    rows += [plain_row(pieces)] if pieces else []
    return [row for row in rows if any(weight for *_, weight in row)]


def whole(rows):
    return rows.batch(range(rows.num_rows))


@pytest.mark.parametrize("packing", [True, False])
@given(lengths=lengths)
def test_rows_are_those_of_a_plain_loop(packing, lengths):
    documents = distinct(lengths)
    batch = whole(token_rows(documents, sequence_length=S, packing=packing))
    expected = np.array(plain_rows(documents, packing), np.float32).reshape(-1, S, len(FIELDS))
    for number, field in enumerate(FIELDS):
        np.testing.assert_array_equal(getattr(batch, field), expected[..., number], err_msg=field)


@pytest.mark.parametrize("packing", [True, False])
@given(lengths=lengths)
def test_every_next_token_of_every_document_is_learned_once(packing, lengths):
    documents = distinct(lengths)
    batch = whole(token_rows(documents, sequence_length=S, packing=packing))
    learned = batch.weights > 0
    pairs = sorted(zip(batch.ids[learned].tolist(), batch.targets[learned].tolist()))
    assert pairs == [(int(a), int(b)) for tokens in documents for a, b in itertools.pairwise(tokens)]


@pytest.mark.parametrize("packing", [True, False])
@given(lengths=lengths)
def test_every_token_is_in_one_row_but_for_last_ones_alone_in_theirs(packing, lengths):
    documents = distinct(lengths)
    batch = whole(token_rows(documents, sequence_length=S, packing=packing))
    present = batch.ids[batch.segments >= 0].tolist()
    assert len(present) == len(set(present))
    missing = set(np.concatenate(documents).tolist()) - set(present)
    assert missing <= {int(tokens[-1]) for tokens in documents}
    if packing and 1 not in lengths:
        assert len(missing) == (sum(lengths) % S == 1)


@pytest.mark.parametrize("packing", [True, False])
def test_rows_without_a_target_do_not_exist(packing):
    documents = distinct([S, *[1] * S, S + 1, 1])
    batch = whole(token_rows(documents, sequence_length=S, packing=packing))
    assert (batch.weights.sum(axis=1) > 0).all()


def test_spans_are_the_same_however_many_are_looked_at_at_once(monkeypatch):
    documents = distinct([3, *[1] * (5 * S), 2 * S, *[1] * (3 * S), 7, *[1] * S])
    expected = whole(token_rows(documents, sequence_length=S, packing=True))
    monkeypatch.setattr(rows_module, "SPANS_AT_ONCE", 2)
    batch = whole(token_rows(documents, sequence_length=S, packing=True))
    for field in FIELDS:
        np.testing.assert_array_equal(getattr(batch, field), getattr(expected, field), err_msg=field)
    np.testing.assert_array_equal(expected.weights, np.array(plain_rows(documents, True))[..., FIELDS.index("weights")])


@pytest.mark.parametrize("packing", [True, False])
def test_documents_of_one_token_each_make_no_row(packing):
    assert token_rows(distinct([1] * 7), sequence_length=S, packing=packing).num_rows == 0


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param(token_rows(distinct([3, 9, 17, 1, 4]), sequence_length=S, packing=True), id="tokens"),
        pytest.param(synthetic_rows(vocab_size=50, sequence_length=S, seed=3, key=8), id="synthetic"),
    ],
)
def test_a_row_depends_on_its_number_alone(rows):
    together = rows.batch([4, 0, 3])
    for place, number in enumerate([4, 0, 3]):
        alone = rows.batch([number])
        for field in FIELDS:
            np.testing.assert_array_equal(getattr(together, field)[place], getattr(alone, field)[0], err_msg=field)


@pytest.mark.parametrize("vocab_size", [2, 7, 129280])
def test_synthetic_tokens_are_below_the_vocabulary(vocab_size):
    batch = synthetic_rows(vocab_size=vocab_size, sequence_length=64, seed=0, key=1).batch(range(40))
    assert 0 <= batch.ids.min() < batch.ids.max() < vocab_size


def test_synthetic_targets_are_the_next_ids():
    batch = synthetic_rows(vocab_size=100, sequence_length=32, seed=0, key=1).batch(range(8))
    np.testing.assert_array_equal(batch.targets[:, :-1], batch.ids[:, 1:])


def test_seven_of_eight_synthetic_tokens_can_be_told_from_the_one_before():
    rows = synthetic_rows(vocab_size=129280, sequence_length=256, seed=5, key=2)
    seen, other = rows.batch(range(200)), rows.batch(range(10**9, 10**9 + 50))
    followers = {}
    for token, target in zip(seen.ids.ravel().tolist(), seen.targets.ravel().tolist()):
        followers.setdefault(token, []).append(target)
    likely = {token: max(set(found), key=found.count) for token, found in followers.items()}
    right = [
        likely[token] == target for token, target in zip(other.ids.ravel().tolist(), other.targets.ravel().tolist())
    ]
    assert len(likely) == CYCLE
    # 12,800 draws: three deviations of a share of 7/8 are 0.009.
    assert abs(np.mean(right) - 7 / 8) < 0.01


def test_synthetic_rows_of_another_key_have_the_same_cycle_and_other_walks():
    first, second = (synthetic_rows(vocab_size=999, sequence_length=16, seed=5, key=key) for key in (1, 2))
    np.testing.assert_array_equal(first.cycle, second.cycle)
    assert not {row.tobytes() for row in first.batch(range(64)).ids} & {
        row.tobytes() for row in second.batch(range(64)).ids
    }
