"""The devices that a CPU makes for a run."""

import jax
import pytest

from raggedmoe.launch.host_devices import make_cpu_devices
from raggedmoe.train.settings.sections import MeshSettings


@pytest.mark.parametrize(("num_processes", "made"), [(1, 8), (2, 4), (3, 3)])
def test_each_process_makes_its_share_of_the_host_devices(monkeypatch, num_processes, made):
    asked = []
    monkeypatch.delenv("XLA_FLAGS")
    monkeypatch.setattr(jax.config, "update", lambda name, value: asked.append((name, value)))
    mesh = MeshSettings(data_parallelism=2, fsdp_parallelism=-1, expert_parallelism=4)
    assert make_cpu_devices(mesh.num_devices, num_processes) == made
    assert asked == [("jax_num_cpu_devices", made)]


def test_a_cpu_that_has_started_with_too_few_devices_says_what_came_too_late(monkeypatch):
    monkeypatch.delenv("XLA_FLAGS")
    num = jax.local_device_count()  # it has started now
    assert make_cpu_devices(num) == 0
    with pytest.raises(ValueError, match=rf"expected {num + 1} devices .* JAX has started with {num}: call raggedmoe"):
        make_cpu_devices(num + 1)
