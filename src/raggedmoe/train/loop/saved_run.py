"""A run that was written down, as a user names it: its folder, or one of its checkpoints.

``RUN`` is the folder of a run, ``RUN@100`` its checkpoint of step 100, which is also ``RUN/checkpoints/step_00000100``.
"""

import os
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from raggedmoe import interop
from raggedmoe.hardware import hardware_by_name
from raggedmoe.interop.companions import read_companions
from raggedmoe.interop.load import load_base
from raggedmoe.interop.native import cast_arrays
from raggedmoe.models.companions import AdapterBase
from raggedmoe.models.config import ModelConfig
from raggedmoe.models.config_json import from_json
from raggedmoe.models.module import Decoder
from raggedmoe.models.parameters import param_specs
from raggedmoe.params import Params
from raggedmoe.storage import AnyPath, ObjectPath, as_path
from raggedmoe.train.checkpoint.folder import STEP
from raggedmoe.train.loop.run_folder import CHECKPOINTS, COMPANIONS, MODEL, RUN
from raggedmoe.train.settings.resolve import make_model
from raggedmoe.train.settings.words import read_values

if TYPE_CHECKING:
    from raggedmoe.train.checkpoint.stored import StoredCheckpoint  # it imports orbax, which takes a second

_AT_STEP = re.compile(r"(.+)@(\d+)")
RUN_FORMS = "the folder of a run (RUN), or one of its checkpoints (RUN@STEP, RUN/checkpoints/step_00000100)"


@dataclass(frozen=True, kw_only=True)
class SavedRun:
    """The folder of a run, and the step of a checkpoint if one was named."""

    folder: AnyPath
    step: int | None = None

    def __str__(self) -> str:
        return str(self.folder) if self.step is None else f"{self.folder}@{self.step}"

    def open_checkpoint(self) -> "StoredCheckpoint":
        """Open the checkpoint that was named, or else the newest that is not damaged. All processes must call it."""
        try:
            from raggedmoe.train.checkpoint.stored import open_checkpoint
        except ImportError as error:
            raise ValueError(
                f"a checkpoint needs more packages to be read ({error}): pip install 'raggedmoe[train]'"
            ) from None
        return open_checkpoint(self.folder / CHECKPOINTS, self.step)


def find_run(place: str | os.PathLike[str] | ObjectPath) -> SavedRun | None:
    """Find the run that a place names; None if there is none, but a model's folder, for example."""
    path = as_path(place)
    if (path / RUN).is_file() or (path / CHECKPOINTS).is_dir():
        return SavedRun(folder=path)
    name = STEP.fullmatch(path.name)
    if name is not None and path.parent.name == CHECKPOINTS:
        return SavedRun(folder=path.parent.parent, step=int(name[1]))
    at_step = _AT_STEP.fullmatch(str(place))
    if at_step is None or path.exists():
        return None
    run = find_run(at_step[1])
    if run is None or run.step is not None:
        raise ValueError(f"{place}: expected {RUN_FORMS}, found no run at {at_step[1]}")
    return SavedRun(folder=run.folder, step=int(at_step[2]))


@dataclass(frozen=True, kw_only=True)
class SavedModel:
    """A model's folder, or the checkpoint of a run that has its parameters."""

    folder: AnyPath  # has the tokenizer, and other files that go with the model
    run: SavedRun | None = None  # whose checkpoint it is; None: the folder has the model too

    def load(
        self,
        *,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike | None = None,
        keep_quantised: bool = False,
        progress: bool = False,
    ) -> Decoder:
        """Load the model, as `interop.load` does."""
        if self.run is None:
            types = {"dtype": dtype, "param_dtype": param_dtype}
            return interop.load(self.folder, **types, keep_quantised=keep_quantised, progress=progress)
        return _load_checkpoint(self.run.open_checkpoint(), self.folder, dtype, param_dtype, keep_quantised)


def find_model(place: str | os.PathLike[str] | ObjectPath) -> SavedModel:
    """Find a model: a folder that `interop.load` reads, a run or one of its checkpoints.

    Of a run it is the trained model, or that of the newest checkpoint while there is none.
    """
    run = find_run(place)
    if run is None:
        return SavedModel(folder=as_path(place))
    if run.step is None and (run.folder / MODEL).is_dir():
        return SavedModel(folder=run.folder / MODEL)
    return SavedModel(folder=run.folder / COMPANIONS, run=run)


def _load_checkpoint(
    stored: "StoredCheckpoint",
    folder: AnyPath,
    dtype: DTypeLike | None,
    param_dtype: DTypeLike | None,
    keep_quantised: bool,
) -> Decoder:
    extra, companions = stored.manifest.extra, read_companions(folder)
    written = stored_model(extra, str(stored.path))
    param_dtype = jnp.dtype(param_dtype or written.param_dtype)
    config = replace(written, param_dtype=param_dtype, dtype=jnp.dtype(dtype or param_dtype))
    frozen: Params = {}
    if keep_quantised and written.lora is None:
        raise ValueError(f"{stored.path}: expected a checkpoint with quantised experts, found one of arrays")
    if written.lora is not None:
        frozen, base = load_base(AdapterBase(**extra["base"]), written, str(stored.path), keep_quantised=keep_quantised)
        companions, frozen = replace(companions, base=base), cast_arrays(frozen, param_specs(config))
    moved = {name: spec for name, spec in param_specs(config).items() if name not in frozen}
    shapes = {name: jax.ShapeDtypeStruct(spec.shape, spec.dtype) for name, spec in moved.items()}
    params = stored.read({"params": shapes})["params"]
    return Decoder(config, params={**params, **frozen}, companions=companions)


def stored_model(extra: dict[str, Any], where: str) -> ModelConfig:
    """Return the model of a checkpoint by what was saved beside its arrays; older ones have the settings alone."""
    if "model" in extra:
        return from_json(extra["model"], where)
    return make_model(read_values(extra["settings"], where), hardware_by_name("cpu"))
