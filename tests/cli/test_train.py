"""`raggedmoe train` before it trains: the devices of a process."""

import jax
import pytest

from raggedmoe.cli.train import make_cpu_devices
from raggedmoe.train.settings.sections import MeshSettings


@pytest.mark.parametrize(("num_processes", "made"), [(1, 8), (2, 4), (3, 3)])
def test_each_process_makes_its_share_of_the_host_devices(monkeypatch, num_processes, made):
    asked = []
    monkeypatch.delenv("XLA_FLAGS")
    monkeypatch.setattr(jax.config, "update", lambda name, value: asked.append((name, value)))
    mesh = MeshSettings(data_parallelism=2, fsdp_parallelism=-1, expert_parallelism=4)
    assert make_cpu_devices(mesh.num_devices, num_processes) == made
    assert asked == [("jax_num_cpu_devices", made)]
