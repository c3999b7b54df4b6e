"""What shows that a kernel works: proofs, and the certificates that `verify` writes."""

import errno
import json
import logging
import pwd
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from raggedmoe.cli.verify import verify
from raggedmoe.compat import JAX_VERSION
from raggedmoe.hardware import HARDWARE
from raggedmoe.kernels.proof import (
    Certificate,
    Level,
    Proof,
    drop_certificates,
    level_on,
    libtpu_version,
    read_certificates,
    source_digest,
    write_certificate,
)
from raggedmoe.kernels.registry import OPERATIONS, implementations


def certificate(**changes):
    fields = {
        "implementation": "grouped_matmul/sparse",
        "source": source_digest(),
        "chip": "tpu7x",
        "jax_version": JAX_VERSION,
        "libtpu_version": libtpu_version(),
        "cases": 12,
        "worst_error": 0.4,
        "seconds": 3.0,
    }
    return Certificate(**fields | changes)


def test_a_written_certificate_is_read_again(tmp_path):
    assert read_certificates(tmp_path) == ()
    path = write_certificate(certificate(), tmp_path)
    assert path.parent == tmp_path
    assert read_certificates(tmp_path) == (certificate(),)


def test_threads_that_write_one_certificate_do_not_disturb_each_other(tmp_path):
    with ThreadPoolExecutor(8) as threads:
        paths = list(threads.map(lambda _: write_certificate(certificate(), tmp_path), range(200)))
    assert list(tmp_path.iterdir()) == [paths[0]]
    assert read_certificates(tmp_path) == (certificate(),)


def test_a_certificate_that_cannot_be_written_leaves_nothing_behind(tmp_path, monkeypatch):
    def full(self, text):
        self.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space left"):
        write_certificate(certificate(), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_user_without_a_home_has_no_certificates_and_is_told_where_they_could_be(monkeypatch):
    def unknown(uid):
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    for name in ("HOME", "XDG_DATA_HOME", "RAGGEDMOE_CERTIFICATES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    read_certificates.cache_clear()
    assert read_certificates() == ()
    assert drop_certificates("grouped_matmul/sparse", "tpu7x") == []
    with pytest.raises(ValueError, match="got a user without a home; set RAGGEDMOE_CERTIFICATES or HOME"):
        write_certificate(certificate())
    with pytest.raises(ValueError, match="got a user without a home"):  # at once, not after all comparisons
        verify(("grouped_matmul",))
    read_certificates.cache_clear()


DEEP, LONG = "[" * 100_000, '{"cases": 1%s}' % ("0" * 5_000)


@pytest.mark.parametrize(
    "text",
    ["{", "[]", json.dumps({"chip": "tpu7x"}), '"\\ud800', DEEP, LONG],
    ids=["cut", "list", "incomplete", "no text", "deep", "long number"],
)
def test_a_corrupt_certificate_is_warned_about_and_ignored(tmp_path, caplog, text):
    write_certificate(certificate(), tmp_path)
    (tmp_path / "broken.json").write_text(text)
    with caplog.at_level(logging.WARNING, logger="raggedmoe"):
        assert read_certificates(tmp_path) == (certificate(),)
    (message,) = [record.getMessage() for record in caplog.records]
    assert "broken.json ignored" in message
    assert "run `raggedmoe verify`" in message


@pytest.mark.parametrize(
    ("hardware", "version", "level"),
    [
        ("tpu7x", "0.11.0", Level.RUN),
        ("tpu7x", "0.10.2", Level.COMPILED),
        ("tpu7x", "0.12.1", Level.COMPILED),
        ("v6e", "0.11.0", Level.COMPILED),
        ("cpu", "0.11.0", Level.UNPROVEN),
    ],
)
def test_the_best_proof_for_chip_and_version_counts(hardware, version, level):
    run = Proof(level=Level.RUN, chips=("tpu7x",), first_jax="0.10.3", last_jax="0.12.0", shown_by="a run")
    proofs = (run, Proof(level=Level.COMPILED, platforms=("tpu",), shown_by="a compile"))
    assert level_on("grouped_matmul/x", proofs, HARDWARE[hardware], version, ())[0] == level


def test_no_implementation_claims_to_have_run_where_the_tests_cannot():
    for name in OPERATIONS:
        for implementation in implementations(name).values():
            for chip in HARDWARE.values():
                level, _ = level_on(implementation.full_name, implementation.proofs, chip, JAX_VERSION, ())
                assert level < Level.RUN or chip is HARDWARE["cpu"]


def test_a_failure_withdraws_its_own_certificates_and_no_others(tmp_path):
    mine = write_certificate(certificate(), tmp_path)
    other = write_certificate(certificate(chip="v6e"), tmp_path)
    (tmp_path / "broken.json").write_text("{")
    assert drop_certificates("grouped_matmul/sparse", "tpu7x", tmp_path) == [mine]
    assert not mine.exists()
    assert other.exists()
