"""Before anything imports JAX: eight host devices, checked annotations, and no certificate but the tests' own."""

import os
import tempfile

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")
_certificates = tempfile.TemporaryDirectory(prefix="raggedmoe-certificates-")
os.environ["RAGGEDMOE_CERTIFICATES"] = _certificates.name

import jax  # noqa: E402
import pytest  # noqa: E402
from hypothesis import settings  # noqa: E402
from jax.sharding import AbstractDevice, AbstractMesh, AxisType  # noqa: E402
from jaxtyping import install_import_hook  # noqa: E402

install_import_hook("raggedmoe", "beartype.beartype")

# An operand whose rank grows by itself hides a missing axis.
jax.config.update("jax_numpy_rank_promotion", "raise")

# Every new shape is a compilation of about a second: few examples, always the same.
settings.register_profile("raggedmoe", deadline=None, derandomize=True, max_examples=25, print_blob=True)
settings.load_profile("raggedmoe")


def pytest_unconfigure() -> None:
    _certificates.cleanup()


@pytest.fixture
def abstract_mesh():
    """Makes the mesh of a chip that this machine does not have."""

    def make(platform: str, kind: str) -> AbstractMesh:
        device = AbstractDevice(device_kind=kind, num_cores=1, platform=platform)
        # JAX 0.12 would make the axis Explicit, for which ragged_dot_general has no rule.
        return AbstractMesh((4,), ("x",), axis_types=(AxisType.Auto,), abstract_device=device)

    return make
