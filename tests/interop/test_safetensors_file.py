"""Our reader and writer of safetensors against the package of that name, and against damaged bytes."""

import contextlib
import json

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from raggedmoe import interop
from raggedmoe.interop.safetensors_file import NewTensor, read_header, write_file
from tests.interop.folders import GOLDEN, SINGLE, assert_same_params, bits

TYPES = (np.float64, np.float32, np.float16, ml_dtypes.bfloat16, np.int64, np.int32, np.int16, np.int8, np.uint8, bool)


def examples():
    """A tensor of every type, and the shapes that are easy to get wrong."""
    rng = np.random.default_rng(0)
    found = {np.dtype(dtype).name: rng.integers(0, 2, (3, 5)).astype(dtype) for dtype in TYPES}
    return {
        **found,
        "scalar": np.asarray(1.5, np.float32),
        "empty": np.zeros((0, 4), np.float32),
        "one row": rng.standard_normal((1, 7)).astype(np.float32),
        "four dimensions": rng.standard_normal((2, 3, 4, 5)).astype(np.float32),
        'quote " and ü': np.ones(1, np.float32),
    }


def write_ours(path, tensors):
    made = [NewTensor(name=n, dtype=t.dtype, shape=t.shape, pieces=iter([t])) for n, t in tensors.items()]
    write_file(path, made, {"format": "pt"}, lambda num_bytes: None)


def test_what_we_write_is_read_by_the_safetensors_package(tmp_path):
    tensors = examples()
    write_ours(tmp_path / SINGLE, tensors)
    with safe_open(tmp_path / SINGLE, framework="numpy") as file:
        assert file.metadata() == {"format": "pt"}
        assert set(file.keys()) == set(tensors)
        for name, tensor in tensors.items():
            found = file.get_tensor(name)
            assert found.dtype == tensor.dtype, name
            np.testing.assert_array_equal(bits(found), bits(tensor), err_msg=name)


def test_what_the_safetensors_package_writes_is_read_by_us(tmp_path):
    tensors = examples()
    save_file(tensors, tmp_path / SINGLE, metadata={"some": "text"})
    found, metadata = read_header(tmp_path / SINGLE)
    assert metadata == {"some": "text"}
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype, name
        assert found[name].shape == tensor.shape, name
        np.testing.assert_array_equal(bits(found[name].read()), bits(tensor), err_msg=name)


def test_rows_of_a_tensor_are_read_alone(tmp_path):
    tensors = examples()
    save_file(tensors, tmp_path / SINGLE)
    found = read_header(tmp_path / SINGLE)[0]["four dimensions"]
    np.testing.assert_array_equal(found.read(1, 2), tensors["four dimensions"][1:2])


def test_data_starts_at_a_multiple_of_eight_bytes(tmp_path):
    for length in range(8):
        write_ours(tmp_path / SINGLE, {"x" * length: np.ones(3, np.float32)})
        assert int.from_bytes((tmp_path / SINGLE).read_bytes()[:8], "little") % 8 == 0


@pytest.fixture(scope="module")
def whole():
    """A valid file of a golden checkpoint as bytes, the end of its header, and the model."""
    folder = GOLDEN / "deepseek_v2"
    raw = (folder / SINGLE).read_bytes()
    return folder, raw, 8 + int.from_bytes(raw[:8], "little"), interop.load(folder)


@settings(max_examples=60)
@given(
    edits=st.lists(
        st.tuples(st.integers(0, 10**6), st.one_of(st.integers(0, 255), st.sampled_from(b'[]{}",:0123456789-.e')))
    ),
    cut=st.one_of(st.none(), st.integers(0, 10**6)),
)
def test_a_file_with_any_bytes_of_its_header_changed_or_cut_anywhere_is_refused_or_gives_the_same(
    edits, cut, whole, tmp_path_factory
):
    folder, raw, end, model = whole
    damaged = bytearray(raw)
    for place, value in edits:
        # Half of the places are in the first kilobyte, where the length and the first tensor are.
        damaged[place // 2 % (end if place % 2 else 1024)] = value
    if cut is not None:
        del damaged[cut % len(raw) :]
    broken = tmp_path_factory.mktemp("damaged")
    (broken / "config.json").write_bytes((folder / "config.json").read_bytes())
    (broken / SINGLE).write_bytes(damaged)
    with contextlib.suppress(ValueError):  # any other exception fails the test
        assert_same_params(interop.load(broken), model)


def test_changing_only_the_free_text_of_a_header_changes_nothing(whole, tmp_path):
    folder, raw, end, model = whole
    header = json.loads(raw[8:end])
    header["__metadata__"] = {"format": "XY"}
    encoded = json.dumps(header).encode()
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    (tmp_path / SINGLE).write_bytes(len(encoded).to_bytes(8, "little") + encoded + raw[end:])
    assert_same_params(interop.load(tmp_path), model)


def test_a_golden_file_written_by_the_package_is_read_tensor_for_tensor():
    path = GOLDEN / "gpt_oss" / SINGLE
    expected = load_file(path)
    found, _ = read_header(path)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        np.testing.assert_array_equal(found[name].read(), tensor)
