"""Checkpoints for the tests: the golden ones, models with every parameter drawn at random, and ways to break a folder.

Files are read and written here with the `safetensors` package, so that ours is held against it.
"""

import json
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from safetensors import deserialize
from safetensors.numpy import load_file, save_file

from raggedmoe.models.config import ModelConfig
from raggedmoe.models.module import Decoder
from raggedmoe.models.parameters import param_specs
from raggedmoe.params import ParamSpec

GOLDEN = Path(__file__).parents[1] / "golden"
FIXTURES = (
    "deepseek_v3",
    "deepseek_v2",
    "deepseek_v2_lite",
    "mixtral",
    "qwen3_moe",
    "qwen3_moe_tied",
    "olmoe",
    "gpt_oss",
)
TINY = ("deepseek-v3-tiny", "deepseek-v2-tiny", "mixtral-tiny", "qwen3-tiny", "olmoe-tiny", "gpt-oss-tiny")
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def expected_of(name: str) -> dict[str, np.ndarray]:
    """What `transformers` computed for a golden fixture."""
    with np.load(GOLDEN / name / "expected.npz") as file:
        return dict(file)


EXPERTS = (".moe.wi_0", ".moe.wi_1", ".moe.wo")
# Of attention, dense MLPs and shared experts; embedding, head, routers and norms are none.
DENSE = re.compile(r"\.(attention\.(wq|wk|wv|wo|q_a|q_b|kv_a|k_b|v_b)|(mlp\.|moe\.shared_)w(i_0|i_1|o))$")


def quantised_in(params: Iterable[str], form: str) -> set[str]:
    """The matrices that a folder has quantised: in mxfp4 the experts', else all of a layer but its router."""
    return {name for name in params if name.endswith(EXPERTS) or (form != "mxfp4" and DENSE.search(name))}


def copied(name: str, folder: Path) -> Path:
    """A golden fixture's checkpoint, to be broken."""
    folder.mkdir(parents=True)
    for path in (GOLDEN / name).iterdir():
        if path.suffix != ".npz":
            shutil.copyfile(path, folder / path.name)
    return folder


def layouts_of(family: str) -> tuple[str, ...]:
    """The ways in which a family's experts can be written."""
    return ("fused",) if family == "gpt_oss" else ("per_expert", "fused")


def drawn_model(config: ModelConfig, seed: int = 0) -> Decoder:
    """A model whose every parameter, norms and biases too, differs from what initialisation would give."""
    rng = np.random.default_rng(seed)
    return Decoder(config, params={name: _drawn(rng, spec) for name, spec in param_specs(config).items()})


def _drawn(rng: np.random.Generator, spec: ParamSpec) -> Any:
    values = rng.standard_normal(spec.shape)
    if spec.init == "normal":
        assert spec.contracts is not None
        axes = (spec.contracts,) if isinstance(spec.contracts, str) else spec.contracts
        values /= np.sqrt(np.prod([spec.shape[spec.axes.index(axis)] for axis in axes]))
    else:
        values = {"ones": 1.0, "zeros": 0.0}[spec.init] + 0.3 * values
    return jnp.asarray(values.astype(spec.dtype))


def assert_same_params(model: Decoder, other: Decoder) -> None:
    """Require the same parameters, bit for bit."""
    ours, theirs = model.params, other.params
    assert ours.keys() == theirs.keys()
    for name, array in ours.items():
        assert array.dtype == theirs[name].dtype, name
        np.testing.assert_array_equal(bits(array), bits(theirs[name]), err_msg=name)


def bits(array: Any) -> np.ndarray:
    """An array's bytes, which also tell -0 from 0."""
    values = np.ascontiguousarray(array)
    return values.reshape(-1).view(np.uint8).reshape(*values.shape, values.dtype.itemsize)


def stored(folder: Path) -> dict[str, np.ndarray]:
    """A folder's tensors, read by the `safetensors` package."""
    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


TYPES = {
    "F32": np.float32,
    "I32": np.int32,
    "I64": np.int64,
    "U8": np.uint8,
    "I8": np.int8,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
}


def stored_quantised(folder: Path) -> dict[str, np.ndarray]:
    """A folder's tensors, as `stored` returns them, which does not know types of 8 bits."""
    return {
        name: np.frombuffer(bytes(entry["data"]), TYPES[entry["dtype"]]).reshape(entry["shape"])
        for path in sorted(folder.glob("*.safetensors"))
        for name, entry in deserialize(path.read_bytes())
    }


def write_checkpoint(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> Path:
    """A folder of one file, written by the `safetensors` package."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}, folder / SINGLE)
    return folder


def write_fp8(folder: Path, out: Path, block: tuple[int, int]) -> Path:
    """A checkpoint of experts one by one again, with the matrices of its layers in blocks of fp8, as DeepSeek's are."""
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "weight_block_size": list(block),
        "activation_scheme": "dynamic",
    }
    tensors: dict[str, np.ndarray] = {}
    for name, tensor in stored_quantised(folder).items():
        if tensor.ndim != 2 or name.endswith(("embed_tokens.weight", "head.weight", "gate.weight", "eh_proj.weight")):
            tensors[name] = tensor
            continue
        values = tensor.astype(np.float32)
        scales = np.zeros([-(-size // step) for size, step in zip(values.shape, block)], np.float32)
        for at in np.ndindex(scales.shape):
            part = tuple(slice(i * step, (i + 1) * step) for i, step in zip(at, block))
            scales[at] = np.abs(values[part]).max() / 448
            values[part] /= scales[at]
        tensors[name], tensors[f"{name}_scale_inv"] = values.astype(ml_dtypes.float8_e4m3fn), scales
    return write_checkpoint(out, config, tensors)


def write_mxfp4(folder: Path, out: Path, seed: int = 0) -> Path:
    """A gpt-oss again with any experts of its sizes, in mxfp4."""
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    tensors, rng = {**stored_quantised(folder)}, np.random.default_rng(seed)
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        tensors[f"{name}_blocks"] = rng.integers(0, 256, (experts, outputs, inputs // 32, 16), np.uint8)
        tensors[f"{name}_scales"] = rng.integers(120, 124, (experts, outputs, inputs // 32), np.uint8)
    return write_checkpoint(out, config, tensors)


def change_tensors(folder: Path, change: Callable[[dict[str, np.ndarray]], None], file: str = SINGLE) -> None:
    """Write one of a folder's files again with its tensors changed in place."""
    tensors = load_file(folder / file)
    change(tensors)
    save_file(tensors, folder / file)


def change_json(path: Path, change: Callable[[Any], None]) -> None:
    """Write a JSON file again with its value changed in place."""
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def change_config(folder: Path, **changes: Any) -> None:
    """Set keys of a folder's config.json."""
    change_json(folder / "config.json", lambda config: config.update(changes))


def change_header(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Write a safetensors file again with another header and the same data."""
    header, data = header_and_data(path)
    change(header)
    write_raw(path, json.dumps(header).encode(), data)


def header_and_data(path: Path) -> tuple[dict[str, Any], bytes]:
    """The two parts of a safetensors file."""
    raw = path.read_bytes()
    end = 8 + int.from_bytes(raw[:8], "little")
    return json.loads(raw[8:end]), raw[end:]


def write_raw(path: Path, header: bytes, data: bytes) -> None:
    """A file with any bytes for a header."""
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)
