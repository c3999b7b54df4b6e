"""The machine is named by what it is, and can be restricted to what another one has."""

import pytest

from raggedmoe.bench import machine
from raggedmoe.bench.machine import cpu_features, isa_environment, restrict_isa, this_machine

CPUINFO = "processor\t: 0\nmodel name\t: A CPU of 2031\nflags\t\t: fpu avx2 fma avx512f amx_bf16\n"


@pytest.fixture
def cpuinfo(tmp_path, monkeypatch):
    place = tmp_path / "cpuinfo"
    place.write_text(CPUINFO)
    monkeypatch.setattr(machine, "CPUINFO", place)
    return place


def test_title_has_the_cpu_its_instructions_and_the_versions(cpuinfo):
    title = this_machine().title
    assert title.startswith("A CPU of 2031, ")
    assert "(avx2, fma, avx512f, amx_bf16); jax 0." in title


def test_without_cpuinfo_there_is_still_a_name(cpuinfo):
    cpuinfo.unlink()
    assert "no vector instructions known" in this_machine().title


def test_isa_restricts_every_library_and_keeps_flags(monkeypatch, cpuinfo):
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_something=1")
    found = isa_environment("avx2")
    assert found["XLA_FLAGS"].startswith("--xla_cpu_something=1 --xla_cpu_max_isa=AVX2 ")
    assert "--xla_cpu_experimental_ynn_fusion_type=" in found["XLA_FLAGS"].split()
    wanted = {"ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "OPENBLAS_CORETYPE", "MKL_ENABLE_INSTRUCTIONS"}
    assert wanted | {"NPY_DISABLE_CPU_FEATURES", "RAGGEDMOE_CPU_ISA"} <= found.keys()
    with restrict_isa("avx2"):
        assert cpu_features() == ("avx2", "fma")
    assert "avx512f" in cpu_features()
    assert "every contender restricted to avx2" in this_machine("avx2").title
    assert isa_environment(None) == {}
