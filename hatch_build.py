"""How the package is built: by hatchling, and where there is a C++ compiler, with the C++ kernels for CPUs inside.

A wheel with them is tagged for its platform, not for a Python: they are one plain C++ library. Without a compiler, or
where they cannot be compiled, it is a pure wheel, which works by the kernels in plain JAX. Their compilation reads
jaxlib's headers, for which a wheel's build asks; of the lowest version that the package supports, as every jaxlib loads
what was compiled with its own headers or older ones. An editable installation needs none of it: there `make` compiles.
"""

import importlib.util
import sys
import sysconfig
import tempfile
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import hatchling.build
from hatchling.build import *  # noqa: F403  (this module is the build backend, with one function of its own)
from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ROOT = Path(__file__).parent
NATIVE = "raggedmoe/kernels/native"


def get_requires_for_build_wheel(config_settings: dict[str, Any] | None = None) -> list[str]:
    """List what the build of a wheel needs: jaxlib's headers, if there is something to compile with them."""
    requires = hatchling.build.get_requires_for_build_wheel(config_settings)
    if load_building().compiler() is None:
        return requires
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    lowest = next(line.removeprefix("jax>=") for line in dependencies if line.startswith("jax>="))
    # A Python that came after it has none of it.
    return [
        *requires,
        f"jaxlib=={lowest}; python_version < '3.15'",
        f"jaxlib>={lowest}; python_version >= '3.15'",
    ]


def load_building() -> ModuleType:
    """Load the file that compiles the kernels, and nothing else of the package: JAX is not there."""
    spec = importlib.util.spec_from_file_location("native_build", ROOT / "src" / NATIVE / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class CustomBuildHook(BuildHookInterface):
    """Puts the library into a wheel. The name of the class is what hatchling looks for."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and have the wheel tagged for its platform; or say why not, and leave it pure."""
        if version == "editable":
            return None
        building = load_building()
        compiler, jaxlib = building.compiler(), importlib.util.find_spec("jaxlib")
        if compiler is None:
            return self.leave_pure(f"no C++ compiler was found (CXX, {', '.join(building.COMPILERS)})")
        if jaxlib is None or jaxlib.origin is None:
            return self.leave_pure("jaxlib, whose headers are needed, is not installed where the wheel is built")
        self.folder = tempfile.TemporaryDirectory()
        library = Path(self.folder.name) / building.library_path().name
        reason = building.compile_library(compiler, str(Path(jaxlib.origin).parent / "include"), library)
        if reason is not None:
            return self.leave_pure(reason)
        build_data["force_include"][str(library)] = f"{NATIVE}/{library.name}"
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform_tag()}"
        return None

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove what was compiled: it is in the wheel."""
        if hasattr(self, "folder"):
            self.folder.cleanup()

    def leave_pure(self, reason: str) -> None:
        """Say why the wheel has no C++ kernels."""
        self.app.display_warning(f"raggedmoe without its C++ kernels for CPUs: {reason}")


def platform_tag() -> str:
    """The machine that the library is for, as wheels are tagged."""
    if sys.platform == "darwin":  # Python may be for two processors, the library is for the one here
        from packaging.tags import platform_tags

        return next(iter(platform_tags()))
    return sysconfig.get_platform().replace("-", "_").replace(".", "_")
