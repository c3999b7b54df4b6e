"""`TrainConfig`, a whole run as a user describes it, and the table of all its settings."""

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax.numpy as jnp

from raggedmoe.interop.named_model import is_folder, named_model
from raggedmoe.models.config import ModelConfig
from raggedmoe.models.config_json import to_json
from raggedmoe.sharding.axes import AXES
from raggedmoe.storage import AnyPath, as_path
from raggedmoe.train.settings.fields import Section, Setting, section_class, section_settings, setting
from raggedmoe.train.settings.sections import (
    CheckpointConfig,
    DataConfig,
    ExecutionSettings,
    MeshSettings,
    ModelOverrides,
    OptimizerConfig,
    RunConfig,
    StepSettings,
)


@dataclass(frozen=True, kw_only=True)
class Source:
    """The words and files that a configuration was read from; empty if it was made in Python."""

    words: Mapping[str, str] = field(default_factory=dict)  # the word that set a setting, by the setting's name
    typed: frozenset[str] = frozenset()  # settings that a word on the command line set, and not a file
    translated: frozenset[str] = frozenset()  # settings that a word of another name set, one of MaxText's
    notes: tuple[str, ...] = ()  # words that change nothing here, or something else than in MaxText, and why


SettingValue = str | bool | int | float | tuple[str, ...] | ModelConfig | None
JsonValue = str | bool | int | float | list[str] | None  # a SettingValue as JSON holds it


def _check_dtypes(model: ModelConfig) -> None:
    """Refuse types of numbers in a model, where a run does not look for them."""
    for name, override in (("dtype", "dtype"), ("param_dtype", "weight_dtype")):
        value, default = (jnp.dtype(getattr(of, name)).name for of in (model, ModelConfig))
        if value != default:
            raise ValueError(
                f"model: expected a ModelConfig with the default {name}={default}, got {value}; set it by "
                f"overrides=ModelOverrides({override}={value!r})"
            )


@section_class
class TrainConfig(Section):
    """A run: what is trained, on what, how, and where it is written.

    What is None, as most defaults are that depend on the model, and what depends on the machine, `resolve` fills in.
    """

    model: str | ModelConfig | None = setting(
        default=None,
        otherwise="demo",
        help="Model to train: a name that `raggedmoe models` lists, or a folder: Hugging Face's or one of ours; in "
        "Python also a ModelConfig",
        name="model_name",
    )
    overrides: ModelOverrides = field(default_factory=ModelOverrides)
    execution: ExecutionSettings = field(default_factory=ExecutionSettings)
    mesh: MeshSettings = field(default_factory=MeshSettings)
    data: DataConfig = field(default_factory=DataConfig)
    step: StepSettings = field(default_factory=StepSettings)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    run: RunConfig = field(default_factory=RunConfig)
    checkpoints: CheckpointConfig = field(default_factory=CheckpointConfig)
    source: Source = field(default_factory=Source, compare=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        start, from_scratch = self.run.load_parameters_path, self.run.from_scratch
        if isinstance(self.model, ModelConfig) and self.model.moe.capacity_factor is not None:
            raise ValueError(
                f"model: expected a ModelConfig without a capacity factor, got {self.model.moe.capacity_factor}; set "
                "it by overrides=ModelOverrides(capacity_factor=…)"
            )
        if isinstance(self.model, ModelConfig):
            _check_dtypes(self.model)
        if from_scratch and not self._names_folder:
            raise ValueError(
                f"from_scratch=true: model_name={self.model_name} is no folder, so it has no parameters to leave out; "
                + ("leave it out" if start is None else f"leave out load_parameters_path={start}, or one of the others")
            )
        if self.optimizer.schedule_steps is not None:
            self.optimizer.check_fits(self.optimizer.schedule_steps, self.shown("schedule_steps"), self.shown)

    def get(self, name: str) -> SettingValue:
        """Return the value of a setting by the name that a user types."""
        declared = SETTINGS[name]
        return getattr(self._holder(declared), declared.field)

    def changes(self) -> dict[str, JsonValue]:
        """Return the settings that differ from those of the demo, as JSON holds them: `config_of` makes it of them."""
        default = TrainConfig().values()
        return {name: value for name, value in self.values().items() if value != default[name]}

    def with_settings(self, values: Mapping[str, SettingValue | JsonValue]) -> "TrainConfig":
        """Return the configuration with other values for some settings, by the names that a user types."""
        sections = _by_section(values)
        of_run = sections.pop("", {})
        changed = {title: replace(getattr(self, title), **fields) for title, fields in sections.items()}
        return replace(self, **of_run, **changed)

    def on_all_devices(self) -> "TrainConfig":
        """Return the configuration that splits the state over all devices, unless a degree was given."""
        degrees = [f"{axis}_parallelism" for axis in AXES]
        has_degree = any(self.is_given(degree) or degree in self.source.words for degree in degrees)
        return self if has_degree else self.with_settings({"fsdp_parallelism": -1})

    @property
    def model_name(self) -> str:
        """The model's name or folder; without one it is that of the parameters to start from, or else the demo.

        A configuration of the user's own is called after the family whose checkpoints it writes.
        """
        if isinstance(self.model, ModelConfig):
            return f"{self.model.family}-custom"
        start = self.run.load_parameters_path
        return start if self.model is None and start is not None else self.value_of("model")

    @property
    def model_folder(self) -> AnyPath | None:
        """The folder that the model is in, if it is no preset."""
        return as_path(self.model_name) if self._names_folder else None

    def read_base_model(self) -> ModelConfig:
        """Return the model before anything is overridden: the user's own, a preset, or what a folder describes."""
        return self.model if isinstance(self.model, ModelConfig) else named_model(self.model_name)

    @property
    def _names_folder(self) -> bool:
        return not isinstance(self.model, ModelConfig) and is_folder(self.model_name)

    @property
    def parameters_folder(self) -> AnyPath | None:
        """The folder of the parameters to start from; None: they are drawn, or those of another run's checkpoint."""
        if self.run.from_scratch or self.run.init_from is not None:
            return None
        start = self.run.load_parameters_path
        return self.model_folder if start is None else as_path(start)

    @property
    def base_folder(self) -> AnyPath | None:
        """The folder of the weights that adapters are trained beside, if there is one; a branch has its parent's."""
        start = self.run.load_parameters_path
        return self.model_folder if start is None else as_path(start)

    def values(self) -> dict[str, JsonValue]:
        """Return all settings by name, as JSON holds them."""
        return {name: _as_json(self.get(name)) for name in SETTINGS}

    def is_given(self, name: str) -> bool:
        """Tell whether a setting was chosen: by a word, or by a value in a file or Python that is not the default."""
        return name in self.source.typed or self.get(name) != SETTINGS[name].default

    def is_typed(self, name: str) -> bool:
        """Tell whether a setting was chosen, and not by a file, which sets many that a run does not read."""
        return self.is_given(name) and (name not in self.source.words or name in self.source.typed)

    def shown(self, name: str) -> str:
        """Return the word that set a setting, for what is said about it; in Python, `name=value`."""
        return self.source.words.get(name, f"{name}={self.get(name)}")

    def _holder(self, declared: Setting) -> Section:
        return getattr(self, declared.section) if declared.section else self


SECTIONS: dict[str, type[Section]] = {
    "model": TrainConfig,
    "overrides": ModelOverrides,
    "execution": ExecutionSettings,
    "mesh": MeshSettings,
    "data": DataConfig,
    "step": StepSettings,
    "optimizer": OptimizerConfig,
    "run": RunConfig,
    "checkpoints": CheckpointConfig,
}


def _settings() -> Iterator[Setting]:
    cls: Any
    for title, cls in SECTIONS.items():
        yield from section_settings(cls, "" if cls is TrainConfig else title)


SETTINGS: dict[str, Setting] = {declared.name: declared for declared in _settings()}


def config_of(values: Mapping[str, SettingValue | JsonValue], source: Source | None = None) -> TrainConfig:
    """Make a configuration of values by the names that a user types, as they are or as JSON holds them."""
    source = Source() if source is None else source
    of_section = _by_section(
        {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    )
    sections: dict[str, Any] = {
        title: cls(**of_section.get(title, {})) for title, cls in SECTIONS.items() if cls is not TrainConfig
    }
    return TrainConfig(**of_section.get("", {}), **sections, source=source)


def _as_json(value: SettingValue) -> JsonValue:
    if isinstance(value, ModelConfig):
        return json.dumps(to_json(value))
    return list(value) if isinstance(value, tuple) else value


def _by_section(values: Mapping[str, SettingValue | JsonValue]) -> dict[str, dict[str, Any]]:
    """Sort values by the section of their settings, and there by field."""
    sections: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        sections.setdefault(SETTINGS[name].section, {})[SETTINGS[name].field] = value
    return sections


def list_changes(old: Mapping[str, Any], new: Mapping[str, Any], changeable: Collection[str] = ()) -> list[str]:
    """List the settings of a run, as JSON holds them, that differ and that a resumed run must not change.

    ``changeable`` names some that this one may change, where others may not.
    """
    return [
        f"{name}={old[name]} is now {new.get(name)}"
        for name, declared in SETTINGS.items()
        if not declared.may_change and name not in changeable and name in old and old[name] != new.get(name)
    ]
