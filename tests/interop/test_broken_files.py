"""A damaged safetensors file, index or set of tensors: one error that names file and tensor, before any tensor is read.

Each case damages a copy of a golden checkpoint; `tests/cli/test_convert.py` runs some of them as a command.
"""

import json
import re

import numpy as np
import pytest

from raggedmoe import interop
from raggedmoe.interop.families import qwen3_moe
from raggedmoe.interop.hf_config import read_config_json
from raggedmoe.interop.safetensors_file import BrokenFileError, StoredTensor
from tests.interop.folders import (
    INDEX,
    SINGLE,
    change_config,
    change_header,
    change_json,
    change_tensors,
    copied,
    header_and_data,
    write_raw,
)

NORM = "model.norm.weight"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
GATE = "model.layers.1.mlp.experts.3.gate_proj.weight"


@pytest.fixture
def single(tmp_path):
    """A checkpoint in one file."""
    return copied("olmoe", tmp_path / "olmoe")


@pytest.fixture
def sharded(tmp_path):
    """A checkpoint in two files with an index."""
    return copied("mixtral", tmp_path / "mixtral")


@pytest.fixture
def nothing_read(monkeypatch):
    """Fails the test if a tensor's bytes are read."""

    def read(self, start, count):
        pytest.fail(f"{self.name} was read although the folder is broken")

    monkeypatch.setattr(StoredTensor, "_bytes", read)


def refused(folder, *named):
    """The message of the error that loading raises; it must contain all of these."""
    with pytest.raises(ValueError) as raised:
        interop.load(folder)
    message = str(raised.value)
    for text in named:
        assert text in message
    return message


HEADERS = {
    "negative size": lambda entry: entry.update(shape=[-32]),
    "size that is no integer": lambda entry: entry.update(shape=[32.0]),
    "size that is a boolean": lambda entry: entry.update(shape=[True]),
    "shape that is no list": lambda entry: entry.update(shape=32),
    "sizes whose product is absurd": lambda entry: entry.update(shape=[2**62, 2**62]),
    "more dimensions than an array has": lambda entry: entry.update(shape=[2**62] * 20_000),
    "more dimensions than an array has, of size 1": lambda entry: entry.update(shape=[32] + [1] * 32),
    "size beyond 64 bits": lambda entry: entry.update(shape=[2**80]),
    "shape larger than its bytes": lambda entry: entry.update(shape=[33]),
    "offsets past the end": lambda entry: entry.update(data_offsets=[o + 10**6 for o in entry["data_offsets"]]),
    "offsets that go backwards": lambda entry: entry.update(data_offsets=entry["data_offsets"][::-1]),
    "negative offsets": lambda entry: entry.update(data_offsets=[-128, 0]),
    "three offsets": lambda entry: entry.update(data_offsets=[0, 128, 256]),
    "overlapping offsets": lambda entry: entry.update(data_offsets=[o - 4 for o in entry["data_offsets"]]),
    "unknown type": lambda entry: entry.update(dtype="F31"),
    "type that is no name": lambda entry: entry.update(dtype=["F32"]),
}


@pytest.mark.parametrize("damage", HEADERS)
def test_an_impossible_entry_in_the_header_is_refused_with_file_and_tensor(damage, single, nothing_read):
    change_header(single / SINGLE, lambda header: HEADERS[damage](header[NORM]))
    with pytest.raises(BrokenFileError) as raised:
        interop.load(single)
    assert f"{SINGLE}: " in str(raised.value)
    # Overlapping bytes belong to two tensors: either may be named.
    assert NORM in str(raised.value) or damage == "overlapping offsets"


def test_bytes_that_belong_to_no_tensor_are_refused(single, nothing_read):
    path = single / SINGLE
    change_header(path, lambda header: header.pop(GATE))
    refused(single, SINGLE, "holes")


def _length_of_2_63(path):
    path.write_bytes((2**63).to_bytes(8, "little") + path.read_bytes()[8:])


def _header(text):
    def damage(path):
        write_raw(path, text, header_and_data(path)[1])

    return damage


def _twice(path):
    header, data = header_and_data(path)
    entry = json.dumps(header[NORM])
    write_raw(path, json.dumps(header)[:-1].encode() + f', "{NORM}": {entry}}}'.encode(), data)


FILES = {
    "header length of 2**63": (_length_of_2_63, str(2**63)),
    "empty file": (lambda path: path.write_bytes(b""), "0 bytes"),
    "four bytes": (lambda path: path.write_bytes(b"\0" * 4), "4 bytes"),
    "truncated in the header": (lambda path: path.write_bytes(path.read_bytes()[:500]), "500 bytes"),
    "header that is no JSON": (_header(b"{'single quotes': 1}"), "JSON header"),
    "header that is a list": (_header(b"[]"), "JSON header"),
    "header that is a number": (_header(b"7"), "JSON header"),
    "header of bytes that are no text": (_header(b"\xff\xfe\x00\x01"), "JSON header"),
    "header of a hundred thousand brackets": (_header(b"[" * 100_000), "JSON header"),
    "entry that is no object": (_header(b'{"model.norm.weight": [1, 2]}'), "JSON header"),
    "entry without offsets": (_header(b'{"model.norm.weight": {"dtype": "F32", "shape": [32]}}'), "data_offsets"),
    "tensor twice in the header": (_twice, NORM),
    # A minute, if each is looked for among all.
    "20,000 tensors twice in the header": (
        _header(b"{%s}" % b",".join(b'"%d":{}' % (number % 20_000) for number in range(40_000))),
        "twice in the header: 0, 1, 2, 3, 4, 5, 6, 7 and 19992 more",
    ),
    "number of a million digits": (_header(b'{"model.norm.weight": {"shape": [1%s]}}' % (b"0" * 10**6)), "JSON header"),
    "bytes after the last tensor": (lambda path: path.write_bytes(path.read_bytes() + b"\0" * 8), "by its header"),
}


@pytest.mark.parametrize("damage", FILES)
def test_a_file_that_is_no_safetensors_file_is_refused_by_name(damage, single, nothing_read):
    change, named = FILES[damage]
    change(single / SINGLE)
    refused(single, f"{SINGLE}: ", named)


def test_a_truncated_file_names_the_tensor_that_is_cut(single, nothing_read):
    path = single / SINGLE
    header, _ = header_and_data(path)
    last = max((name for name in header if name != "__metadata__"), key=lambda name: header[name]["data_offsets"][1])
    path.write_bytes(path.read_bytes()[:-4])
    refused(single, SINGLE, f"{last} ends", "truncated")


def test_a_file_that_shrinks_while_it_is_read_is_refused(single, monkeypatch):
    whole = StoredTensor._bytes

    def shrinking(self, start, count):
        self.path.write_bytes(self.path.read_bytes()[: self.offset])
        return whole(self, start, count)

    monkeypatch.setattr(StoredTensor, "_bytes", shrinking)
    refused(single, SINGLE, "ended early", "model.embed_tokens.weight")


# The index


def test_a_missing_shard_is_named_with_what_it_holds(sharded, nothing_read):
    (sharded / SECOND).unlink()
    held = json.loads((sharded / INDEX).read_text())["weight_map"]
    first = next(name for name, file in held.items() if file == SECOND)
    message = refused(sharded, SECOND, first)
    assert FIRST not in message


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": ["a"]}', '{"weight_map": null}', "[" * 100_000])
def test_an_index_without_a_map_of_tensors_to_files_is_refused(text, sharded, nothing_read):
    (sharded / INDEX).write_text(text)
    refused(sharded, f"{INDEX}: expected")


def test_of_many_missing_shards_some_are_named(sharded, nothing_read):
    held = {f"tensor.{number}": f"{number:06}.safetensors" for number in range(20_000)}  # half a minute, if all by all
    change_json(sharded / INDEX, lambda index: index.update(weight_map=held))
    message = refused(sharded, "000000.safetensors, 000001.safetensors", "and 19992 more", "tensor.0, tensor.1")
    assert len(message) < 1000


@pytest.mark.parametrize(
    "target",
    [
        "../outside.safetensors",
        "inside/../../outside.safetensors",
        "/tmp/outside.safetensors",
        "..\\outside.safetensors",
        "C:\\outside.safetensors",
        "model.bin",
        "",
        3,
    ],
)
def test_a_path_that_leads_out_of_the_folder_or_to_no_safetensors_file_is_refused(target, sharded, nothing_read):
    (sharded.parent / "outside.safetensors").write_bytes((sharded / FIRST).read_bytes())
    change_json(sharded / INDEX, lambda index: index["weight_map"].update({NORM: target}))
    refused(sharded, f"{INDEX}: ", NORM, repr(str(target)))


def test_a_file_name_too_long_for_the_system_is_refused_as_a_missing_file(sharded, nothing_read):
    name = "m" * 300 + ".safetensors"
    change_json(sharded / INDEX, lambda index: index["weight_map"].update({NORM: name}))
    refused(sharded, name, NORM)


def test_a_tensor_that_the_index_names_and_no_file_holds_is_listed(sharded, nothing_read):
    change_json(sharded / INDEX, lambda index: index["weight_map"].update({"model.ghost": FIRST}))
    refused(sharded, INDEX, "not where they should be: model.ghost")


def test_a_tensor_that_a_file_holds_and_the_index_does_not_is_listed(sharded, nothing_read):
    change_json(sharded / INDEX, lambda index: index["weight_map"].pop(NORM))
    refused(sharded, INDEX, f"not in the index: {NORM}")


def test_a_tensor_in_another_file_than_the_index_says_is_listed(sharded, nothing_read):
    def swap(index):
        index["weight_map"][NORM] = FIRST if index["weight_map"][NORM] == SECOND else SECOND

    change_json(sharded / INDEX, swap)
    refused(sharded, INDEX, f"not where they should be: {NORM}")


def test_files_of_one_name_in_two_subfolders_are_told_apart(sharded, nothing_read):
    def into_folders(index):
        index["weight_map"] = {
            name: ("one/" if file == FIRST else "two/") + SINGLE for name, file in index["weight_map"].items()
        }
        index["weight_map"][NORM] = "one/" + SINGLE

    assert json.loads((sharded / INDEX).read_text())["weight_map"][NORM] == SECOND
    for folder, file in (("one", FIRST), ("two", SECOND)):
        (sharded / folder).mkdir()
        (sharded / file).rename(sharded / folder / SINGLE)
    change_json(sharded / INDEX, into_folders)
    refused(sharded, INDEX, f"not where they should be: {NORM}")


def test_a_tensor_in_two_files_is_refused_with_both(sharded, nothing_read):
    change_tensors(sharded, lambda tensors: tensors.update({NORM: np.ones(32, np.float32)}), FIRST)
    refused(sharded, f"{NORM} is in two files, {FIRST} and {SECOND}")


# What is stored against what config.json says


def test_an_unknown_tensor_is_listed_with_its_file(single, nothing_read):
    change_tensors(single, lambda tensors: tensors.update({"model.extra": np.zeros((2, 3), np.float32)}))
    refused(single, "unknown (1)", f"model.extra [2, 3] in {SINGLE}", "nothing was loaded")


def test_a_missing_tensor_is_listed_with_its_shape(single, nothing_read):
    change_tensors(single, lambda tensors: tensors.pop(NORM))
    refused(single, "missing (1)", f"{NORM} [32]")


def test_one_missing_expert_is_listed(single, nothing_read):
    change_tensors(single, lambda tensors: tensors.pop(GATE))
    refused(single, "missing (1)", f"{GATE} [24, 32]")


def test_a_misshapen_tensor_is_listed_with_expected_and_found(single, nothing_read):
    change_tensors(single, lambda tensors: tensors.update({GATE: np.zeros((32, 24), np.float32)}))
    refused(single, "misshapen (1)", f"{GATE} in {SINGLE}: expected [24, 32], found [32, 24]")


def test_a_misshapen_tensor_with_as_many_elements_is_refused(single, nothing_read):
    change_tensors(single, lambda tensors: tensors.update({GATE: tensors[GATE].reshape(-1)}))
    refused(single, f"{GATE} in {SINGLE}: expected [24, 32], found [768]")


def test_integers_where_floats_are_expected_are_refused(single, nothing_read):
    change_tensors(single, lambda tensors: tensors.update({NORM: np.ones(32, np.int32)}))
    refused(single, "of a wrong type (1)", f"{NORM} in {SINGLE}: expected a float, found int32")


def test_experts_in_both_layouts_at_once_are_refused(single, nothing_read):
    fused = "model.layers.0.mlp.experts.down_proj"
    change_tensors(single, lambda tensors: tensors.update({fused: np.zeros((8, 32, 24), np.float32)}))
    refused(single, "twice (1)", fused)


def test_everything_that_is_wrong_is_listed_at_once(single, nothing_read):
    def damage(tensors):
        tensors["model.extra"] = np.zeros(1, np.float32)
        del tensors[NORM]
        tensors[GATE] = np.zeros((1, 1), np.float32)

    change_tensors(single, damage)
    refused(single, "model.extra", NORM, GATE, "missing (1)", "misshapen (1)", "unknown (1)")


def test_a_config_with_another_width_lists_what_has_the_wrong_shape_and_how_many(single, nothing_read):
    change_config(single, intermediate_size=25)
    message = refused(single, "misshapen (48)", "expected [25, 32], found [24, 32]", "and 28 more")
    assert message.count("\n") < 40


def test_a_config_with_fewer_layers_lists_the_others_as_unknown(single, nothing_read):
    change_config(single, num_hidden_layers=1)
    message = refused(single, "unknown", "model.layers.1.input_layernorm.weight")
    assert re.search(r"unknown \(\d+\)", message)
    assert "missing" not in message


# Small files that ask for much: each of these would take minutes, if not hours, if all of it were made


def test_a_config_that_describes_far_more_tensors_than_there_are_is_refused_before_they_are_listed(single):
    change_config(single, num_hidden_layers=10_000, num_experts=10_000)
    refused(single, "config.json describes more than 10138 tensors, found 69", "numbers of layers and experts")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_hidden_layers": 10_001}, "expected 'num_hidden_layers' to be at most 10000, got 10001"),
        (
            {"num_attention_heads": 10**12, "num_key_value_heads": 7, "head_dim": 8},
            "num_heads to be at most 2147483647",
        ),
        ({"num_attention_heads": 2**31 - 2, "num_key_value_heads": 4, "head_dim": 8}, "num_kv_heads in [1, 2, 3, 6,"),
        ({"hidden_size": 2**40, "head_dim": 8}, "at most 2147483647, got 1099511627776"),
        ({"rope_theta": 10**400}, "expected 'rope_theta' to be a number, got 1000"),
    ],
)
def test_numbers_beyond_all_models_are_refused_with_the_file(changes, named, single):
    change_config(single, **changes)
    refused(single, "config.json: ", named)


def test_a_list_of_dense_layers_may_be_long(tmp_path):
    folder = copied("qwen3_moe", tmp_path / "qwen3_moe")
    change_config(folder, num_hidden_layers=10_000, mlp_only_layers=[20_000] * 100_000)
    assert qwen3_moe.read_config(read_config_json(folder)).dense_layers == ()
    change_config(folder, mlp_only_layers=[[0]])
    refused(folder, "config.json: expected 'mlp_only_layers' to be a list of layers, got [[0]]")


# Folders


def test_a_folder_of_pickles_is_refused_with_the_reason(single):
    (single / SINGLE).rename(single / "pytorch_model.bin")
    refused(single, "pytorch_model.bin", "runs the code of whoever made it", "safetensors")


def test_a_folder_without_weights_is_refused(single):
    (single / SINGLE).unlink()
    refused(single, SINGLE, INDEX)


@pytest.mark.parametrize("path", ["nowhere", "file"])
def test_what_is_no_folder_is_refused(path, tmp_path):
    (tmp_path / "file").write_text("")
    refused(tmp_path / path, path, "config.json")


def test_old_rotary_buffers_are_passed_over(single, golden_model):
    buffers = {f"model.layers.{n}.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32) for n in range(2)}
    change_tensors(single, lambda tensors: tensors.update(buffers))
    assert interop.load(single).config == golden_model("olmoe").config
