"""The stored problem: what the router decides is clear, and all processes read the same."""

import numpy as np
import pytest

from raggedmoe.bench.problem import read_array, routing_of, write_array


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rounding_sends_no_token_to_another_expert(problem, dtype):
    case = problem("layer", dtype=dtype)
    x, router = (np.asarray(read_array(case.place, name, dtype), np.float32) for name in ("x", "router"))
    logits = np.sort(x @ router.T, axis=1)[:, ::-1]
    per_token = case.sizes.experts_per_token
    assert (logits[:, per_token - 1] - logits[:, per_token]).min() > 2
    chosen = np.argsort(-(x @ router.T), axis=1)[:, :per_token]
    np.testing.assert_array_equal(np.sort(chosen), np.sort(routing_of(case.place, dtype).experts))


def test_rows_are_grouped_by_their_experts(problem):
    case = problem()
    routing = routing_of(case.place, case.dtype)
    for expert, rows in routing.groups():
        assert (routing.experts[routing.token_of_row[rows]] == expert).any(1).all()
    assert routing.group_sizes.sum() == case.sizes.rows


def test_the_experts_are_the_same_in_the_layout_of_transformers(problem):
    case = problem("layer", dtype="bfloat16")
    names = ("wi_0", "wi_1", "wo", "gate_up", "down")
    wi_0, wi_1, wo, gate_up, down = (read_array(case.place, name, "bfloat16") for name in names)
    np.testing.assert_array_equal(gate_up, np.concatenate((wi_0, wi_1), axis=1))
    np.testing.assert_array_equal(down, np.swapaxes(wo, 1, 2))


def test_what_one_process_writes_to_a_mapped_array_stays_there(tmp_path):
    write_array(tmp_path, "x", np.ones(5), "float32")
    read_array(tmp_path, "x")[:] = 2
    np.testing.assert_array_equal(read_array(tmp_path, "x"), np.ones(5))
