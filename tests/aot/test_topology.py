"""Names of topologies, the compiler that they need, and what a function traced for one of them sees."""

import importlib.metadata

import jax
import pytest

from raggedmoe.aot import topology
from raggedmoe.aot.topology import check_compiler, check_topology_name, find_chip, find_topology, target_topology
from raggedmoe.hardware import HARDWARE, target_hardware
from tests.aot.marks import NEEDS_LIBTPU


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("v7x:2x2x1", "unknown topology 'v7x:2x2x1': expected one of v4:2x2x1, .*tpu7x:2x2x1, cpu; did you mean"),
        ("v6e", "topology 'v6e': expected the chips in each direction, as in .*v6e:2x2"),
        ("v6e:2", "topology 'v6e:2': expected the chips in each direction"),
        ("tpu7x:2x2x1x1", "expected the chips in each direction"),
    ],
)
def test_a_bad_name_is_refused_with_the_known_ones(name, message):
    with pytest.raises(ValueError, match=message):
        check_topology_name(name)


@pytest.mark.parametrize("name", topology.EXAMPLES)
def test_the_known_ones_are_of_chips_in_the_table(name):
    assert find_chip(name) is HARDWARE[name.partition(":")[0]]


def test_without_a_compiler_one_line_says_what_to_install(monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(
        ValueError, match=r"pip install 'raggedmoe\[tpu\]'; JAX .* needs libtpu==0\.0\.\d+\.\*$"
    ) as error:
        check_compiler()
    assert "\n" not in str(error.value)


def test_a_compiler_for_another_jax_is_refused_with_the_one_it_needs(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.0.1")
    with pytest.raises(ValueError, match=r"needs libtpu==0\.0\.\d+\.\*, found 0\.0\.1; pip install 'libtpu==0\.0"):
        check_compiler()


class TestWithTheCompiler:
    pytestmark = NEEDS_LIBTPU

    @pytest.mark.parametrize(
        ("name", "devices", "device_bytes"),
        [("v5e:2x2", 4, 16 * 10**9), ("v6e:2x2", 4, 32 * 10**9), ("tpu7x:2x2x1", 8, 96 * 2**30)],
    )
    def test_the_memory_of_a_device_is_its_share_of_a_chip(self, name, devices, device_bytes):
        found = find_topology(name)
        assert (len(found.devices), found.device_bytes) == (devices, device_bytes)

    def test_a_layout_that_the_compiler_refuses_is_an_error_with_its_words(self):
        with pytest.raises(ValueError, match=r"topology 'v6e:3x3': .*not divisible.*; known are v4:2x2x1"):
            find_topology("v6e:3x3")

    def test_what_is_traced_for_it_is_for_its_chip(self):
        found = find_topology("v5p:2x2x1")
        with target_topology(found):
            assert target_hardware() is HARDWARE["v5p"]
        with target_topology(found, found.mesh(data=2, expert=2)):
            assert target_hardware() is HARDWARE["v5p"]
            assert jax.sharding.get_abstract_mesh().shape == {"data": 2, "expert": 2}

    def test_axes_that_do_not_cover_its_devices_are_refused(self):
        with pytest.raises(ValueError, match=r"multiply to the 4 devices, got \{'data': 3\}"):
            find_topology("v6e:2x2").mesh(data=3)
