"""`raggedmoe import` and `raggedmoe export` as a user types them."""

import subprocess
import sys

import numpy as np
import pytest

from raggedmoe import interop
from tests.interop.folders import (
    GOLDEN,
    INDEX,
    SINGLE,
    assert_same_params,
    change_config,
    change_header,
    change_json,
    change_tensors,
    copied,
    stored,
)

NORM = "model.norm.weight"


def test_import_and_export_give_a_checkpoint_back_bit_for_bit(raggedmoe, tmp_path):
    native, out = tmp_path / "native", tmp_path / "out"
    code, printed, _ = raggedmoe("import", GOLDEN / "mixtral", native)
    assert code == 0
    assert "imported mixtral" in printed
    code, printed, _ = raggedmoe("export", native, out)
    assert code == 0
    assert "exported mixtral" in printed
    found, expected = stored(out), stored(GOLDEN / "mixtral")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        np.testing.assert_array_equal(found[name], tensor, err_msg=name)


def test_export_changes_layout_and_type(raggedmoe, tmp_path):
    code, _, _ = raggedmoe(
        "export", GOLDEN / "qwen3_moe_tied", tmp_path / "out", "--layout", "fused", "--dtype", "float16"
    )
    assert code == 0
    tensors = stored(tmp_path / "out")
    assert tensors.keys() == stored(GOLDEN / "qwen3_moe_fused").keys()
    assert tensors["model.embed_tokens.weight"].dtype == np.float16


def test_import_takes_a_type(raggedmoe, tmp_path):
    assert raggedmoe("import", GOLDEN / "olmoe", tmp_path / "out", "--dtype", "bfloat16")[0] == 0
    assert str(interop.load(tmp_path / "out").params["embedding"].dtype) == "bfloat16"


@pytest.mark.parametrize("command", ["import", "export"])
def test_the_path_of_the_result_is_printed_as_it_is(command, raggedmoe, tmp_path):
    out = tmp_path / ("long-" * 20) / "[bold]"
    code, printed, _ = raggedmoe(command, GOLDEN / "olmoe", out)
    assert code == 0
    assert str(out) in printed


def _outside(folder):
    change_json(folder / INDEX, lambda index: index["weight_map"].update({NORM: "../model.safetensors"}))


def _absurd(path):
    path.write_bytes((2**63).to_bytes(8, "little") + path.read_bytes()[8:])


def _wrong_shape(tensors):
    tensors[NORM] = np.ones(31, np.float32)


def _extra(tensors):
    tensors["model.extra"] = np.ones(31, np.float32)


FIRST = "model-00001-of-00002.safetensors"

BREAKAGES = {
    "missing shard": ("mixtral", lambda f: (f / FIRST).unlink(), [FIRST, "model.embed_tokens.weight"]),
    "truncated file": ("olmoe", lambda f: (f / SINGLE).write_bytes((f / SINGLE).read_bytes()[:-1]), [SINGLE, NORM]),
    "wrong shape": ("olmoe", lambda f: change_tensors(f, _wrong_shape), [SINGLE, NORM, "[32]", "[31]"]),
    "extra tensor": ("olmoe", lambda f: change_tensors(f, _extra), [SINGLE, "model.extra"]),
    "path out of the folder": ("mixtral", _outside, [INDEX, NORM, "../model.safetensors"]),
    "absurd header": ("olmoe", lambda f: _absurd(f / SINGLE), [SINGLE, str(2**63)]),
    "unknown type": (
        "olmoe",
        lambda f: change_header(f / SINGLE, lambda header: header[NORM].update(dtype="F31")),
        [SINGLE, NORM, "F31"],
    ),
    "pickle": ("olmoe", lambda f: (f / SINGLE).rename(f / "pytorch_model.bin"), ["pytorch_model.bin", "refused"]),
    "other activation": ("olmoe", lambda f: change_config(f, hidden_act="gelu"), ["config.json", "hidden_act='gelu'"]),
    "unknown family": ("olmoe", lambda f: change_config(f, model_type="olmo"), ["did you mean 'olmoe'"]),
}


@pytest.mark.parametrize("damage", BREAKAGES)
def test_a_broken_folder_is_one_message_and_nothing_is_written(damage, raggedmoe, tmp_path):
    name, change, named = BREAKAGES[damage]
    folder = copied(name, tmp_path / "broken")
    change(folder)
    code, out, error = raggedmoe("import", folder, tmp_path / "deep" / "out")
    assert code == 2
    assert out == ""
    assert error.startswith("raggedmoe: ")
    assert error.count("raggedmoe: ") == 1
    for text in named:
        assert text in error
    assert [path.name for path in tmp_path.iterdir()] == ["broken"]


@pytest.mark.parametrize("command", ["import", "export"])
def test_a_folder_with_files_is_not_touched(command, raggedmoe, tmp_path):
    (tmp_path / "mine.txt").write_text("keep")
    code, _, error = raggedmoe(command, GOLDEN / "olmoe", tmp_path)
    assert code == 2
    assert "expected a new or empty folder" in error
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("export", GOLDEN / "olmoe", "OUT", "--layout", "fussed"), "did you mean 'fused'"),
        (("export", GOLDEN / "gpt_oss", "OUT", "--layout", "mxfp4"), "expected one of fused"),
        (("export", GOLDEN / "olmoe", "OUT", "--dtype", "float23"), "did you mean 'float32'"),
        (("import", GOLDEN / "olmoe", "OUT", "--dtype", "float23"), "did you mean 'float32'"),
        (("import", GOLDEN / "olmoe", "OUT", "--dtype", "float64"), "JAX_ENABLE_X64"),
    ],
)
def test_a_wrong_option_is_one_line_and_nothing_is_written(arguments, said, raggedmoe, tmp_path):
    code, _, error = raggedmoe(*(tmp_path / "out" if argument == "OUT" else argument for argument in arguments))
    assert code == 2
    assert said in error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.ci
def test_a_new_process_ends_with_the_exit_code_and_without_a_traceback(tmp_path):
    copied("olmoe", tmp_path / "broken")
    _absurd(tmp_path / "broken" / SINGLE)
    code = "from raggedmoe.cli.main import main; main()"
    run = subprocess.run(
        [sys.executable, "-c", code, "import", tmp_path / "broken", tmp_path / "out"], capture_output=True, text=True
    )
    assert run.returncode == 2
    assert run.stdout == ""
    assert "Traceback" not in run.stderr
    assert SINGLE in run.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["broken"]


def test_what_is_imported_is_loaded_as_what_was_there(raggedmoe, tmp_path):
    assert raggedmoe("import", GOLDEN / "gpt_oss", tmp_path / "native")[0] == 0
    assert_same_params(interop.load(tmp_path / "native"), interop.load(GOLDEN / "gpt_oss"))
