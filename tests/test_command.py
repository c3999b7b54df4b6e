"""The `raggedmoe` command before JAX is there: what it answers itself, and how it prepares the environment."""

import os
import subprocess
import sys
import time

import pytest

import raggedmoe_command as command
from raggedmoe.cli import known_names
from raggedmoe.cli import main as cli
from raggedmoe.train.settings.config import SETTINGS
from raggedmoe.train.settings.other_names import OTHER_NAMES
from raggedmoe.train.settings.words import read_words
from raggedmoe_command import answers, compilation_cache, large_pages
from raggedmoe_command.answers import answer
from raggedmoe_command.compilation_cache import machine_key, remove_old_programs, use_compilation_cache
from raggedmoe_command.platforms import leave_out_missing_tpu
from tests.train.runs import curve

SCRIPT = """
import os, resource, sys
from raggedmoe_command import large_pages as command
if "first" in os.environ:
    assert int(os.environ["first"]) == os.getpid()
os.environ["first"] = str(os.getpid())
command.restart_with_large_pages()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
block = bytearray(2**26)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 1000, os.environ.get(command.TUNABLES))
print("warned" in sys.warnoptions[0], sys.argv[1:], sys.stdin.read(), "jax" in sys.modules)
sys.exit(75)
"""
needs_large_pages = pytest.mark.skipif(
    not large_pages.are_large_pages_possible(), reason="no glibc of 2.35, or a kernel without large pages"
)


def run(*arguments, script=SCRIPT, **variables):
    environment = {name: value for name, value in os.environ.items() if name != large_pages.TUNABLES}
    return subprocess.run(
        [sys.executable, "-W", "ignore:warned", "-c", script, *arguments],
        env={**environment, "PYTHONPATH": os.pathsep.join(sys.path), **variables},
        input="given",
        capture_output=True,
        text=True,
    )


@needs_large_pages
def test_it_starts_again_once_with_large_pages_and_all_else_as_it_was():
    done = run("train", "steps=3", "a b")
    assert done.stdout.splitlines() == [
        f"True {':'.join(('glibc.malloc.hugetlb=1', *large_pages.KEPT_HEAP))}",
        "True ['train', 'steps=3', 'a b'] given False",
    ]
    assert (done.returncode, done.stderr) == (75, "")


@needs_large_pages
def test_other_tunables_stay_and_a_setting_of_the_user_is_left_alone():
    other, same = "glibc.malloc.trim_threshold=1000000", "glibc.malloc.hugetlb=0"
    assert run(**{large_pages.TUNABLES: other}).stdout.splitlines()[0].endswith(f" {other}:glibc.malloc.hugetlb=1")
    assert run(**{large_pages.TUNABLES: same}).stdout.splitlines()[0] == f"False {same}"


@needs_large_pages
def test_memory_that_is_freed_is_there_for_the_next_call():
    """Of any thread: XLA's allocate too. 100 MB, each page of it touched, ten times."""
    script = (
        SCRIPT.split("before =")[0]
        + """
import threading
def faults():
    block = bytearray(100 << 20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def compare():
    faults()
    before = faults()
    print(max(faults() - before for _ in range(10)))
thread = threading.Thread(target=compare)
thread.start()
thread.join()
"""
    )
    assert int(run(script=script).stdout) < 20  # 50 pages of 2 MB each time where it is given back


def test_where_jax_is_loaded_or_pages_are_not_to_be_had_nothing_is_started(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "execve", lambda *_: pytest.fail("started again"))
    monkeypatch.delenv(large_pages.TUNABLES, raising=False)
    assert "jax" in sys.modules
    large_pages.restart_with_large_pages()
    monkeypatch.delitem(sys.modules, "jax")
    for text in ("always madvise [never]\n", None):
        monkeypatch.setattr(large_pages, "KERNEL_SETTING", tmp_path / str(text is None))
        if text is not None:
            large_pages.KERNEL_SETTING.write_text(text)
        large_pages.restart_with_large_pages()


@pytest.mark.parametrize("error", [OSError("no such file"), None])
def test_a_command_that_computes_nothing_is_run_as_it_is(error, monkeypatch):
    """And so is one that cannot be started again."""
    calls = []

    def execve(*_):
        calls.append("execve")
        raise error or AssertionError

    monkeypatch.setattr(os, "execve", execve)
    monkeypatch.setattr(large_pages, "with_large_pages", lambda environment: dict(environment))
    monkeypatch.setattr(cli, "main", lambda: calls.append("main"))
    monkeypatch.delitem(sys.modules, "jax")  # after all imports, which would bring it back
    monkeypatch.setattr(command, "use_compilation_cache", lambda environment: None)
    monkeypatch.setattr(sys, "argv", ["raggedmoe", "train" if error else "models"])
    command.main()
    assert calls == (["execve", "main"] if error else ["main"])


def test_every_command_that_starts_again_is_one():
    assert {*command.COMPUTING, *command.CACHED} <= set(cli.COMMANDS)


def test_the_help_fits_a_screen_and_has_every_command():
    lines = answer([]).text.splitlines()
    assert answer(["--help"]).text.splitlines() == lines
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    assert all(any(line.startswith(f"  {name} ") for line in lines) for name in cli.COMMANDS)


def test_the_names_are_those_of_the_package():
    """`python -m raggedmoe.cli.known_names --write` makes the file."""
    assert answers.read_names() == known_names.known_names()


def test_what_others_call_a_setting_is_none_of_ours_and_leads_to_one():
    known = {*SETTINGS, *answers.read_names()["maxtext"]}
    assert not known & OTHER_NAMES.keys()
    assert set(OTHER_NAMES.values()) <= SETTINGS.keys()


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("tran", "unknown command 'tran'; did you mean 'train'?"),
        ("train lr=1", "unknown setting 'lr': did you mean learning_rate?"),
        ("train --lr 1", "unknown setting 'lr': did you mean learning_rate?"),
        ("train vocab_sizee=9", "unknown setting 'vocab_sizee': did you mean vocab_size?"),
        ("plan olmoe lr=1 --devices 2", "unknown setting 'lr': did you mean learning_rate?"),
        ("launch --processes 2 -- train lr=1", "unknown setting 'lr': did you mean learning_rate?"),
        ("train zzzzzzz=1", "unknown setting 'zzzzzzz': nothing is named like it."),
        ("train olmo", "unknown model 'olmo': expected a folder with a model, or one of"),
        ("train olmo lr=1", "2 words cannot be taken:"),
        ("train optimizer=muon", "unknown setting 'optimizer': did you mean opt_type?"),
        ("train epochs=3", "unknown setting 'epochs': did you mean steps?"),
        ("train seq=64", "unknown setting 'seq': did you mean max_target_length?"),
        ("train lora_r=8", "unknown setting 'lora_r': did you mean lora_rank?"),
        ("train eval_dataset=x", "unknown setting 'eval_dataset': did you mean eval_paths?"),
        ("plan olmoe --devces 3", "unknown option '--devces': did you mean --devices?"),
        ("plan olmoe --devices 3 lr=1", "unknown setting 'lr': did you mean learning_rate?"),
        ("plan olmoe --devices 3 --lr 1", "unknown setting 'lr': did you mean learning_rate?"),
        ("plan olmoe --hardware h10", "unknown hardware 'h10': expected one of cpu, "),
        ("launch --proceses 2 -- train", "unknown option '--proceses': did you mean --processes?"),
        ("explain deepsek-v3", "unknown model 'deepsek-v3': expected a folder with a model, or one of"),
        ("explain --model deepsek-v3", "unknown model 'deepsek-v3': expected one of"),
        ("compile deepseek-v9", "unknown subject 'deepseek-v9': expected one of ragged_gather,"),
        ("compile model deepseek-v9", "unknown model 'deepseek-v9': expected a folder with a model, or one of"),
        ("compile layer deepseek-v9 --tokens 8", "unknown model 'deepseek-v9': expected a folder with a model"),
        ("bench layr", "unknown subject 'layr': expected one of ragged_gather,"),
        ("bench layer olmo num_experts=8", "unknown subject 'olmo': expected one of ragged_gather,"),
        ("models olmo", "unknown model 'olmo': expected a folder with a model, or one of"),
        ("verify grouped_matmull", "unknown subject 'grouped_matmull': expected one of ragged_gather,"),
        ("generate out --promt a", "unknown option '--promt': did you mean --prompt?"),
        ("tokenize a b --zzzzzz", "unknown option '--zzzzzz': nothing is named like it. `raggedmoe tokenize --help`"),
    ],
)
def test_a_mistyped_name_is_answered(typed, said):
    found = answer(typed.split())
    assert found.code == 2
    assert found.text.startswith(f"raggedmoe: {said}")


@pytest.mark.parametrize(
    "typed",
    [
        "train",
        "train olmoe-tiny steps=3 --weight-decay 0.1 vocab-size=300 ici_fsdp_parallelism=2",
        "train run.toml",
        "train some/folder",
        "explain --shape T=8,D=16,F=32,E=4,K=2",
        "compile grouped_matmul --shape R=64,I=8,O=8,G=2 --trip 3=4",
        "launch --processes 2 -- train olmoe-tiny",
        "train lr=1 --help",
        "generate out/demo/model --prompt a=b",
        "bench layer --case mixtral",
        "bench layer sweep train --dtypes float32 bfloat16 --json --plot out.png",
        "bench layer some/folder expert_parallelism=2 --devices 2",
        "compile load_parameters_path=model",
        "compile run.toml --topology cpu",
        "compile layer llama4-scout",
        "compile grouped_matmul --no-json --against dense",
        "explain --model llama4-scout --hardware tpu7x --moe_backend auto",
        "models tests docs/there-may-be-one",
        "plan --devices=2 --vocab-size 300 --steps 3",
        "launch --render jobset --xla-flags --xla_a=b --image i -- train olmoe-tiny",
        "generate out --prompt --lr",
        "verify",
    ],
)
def test_what_may_be_right_is_left_to_the_command(typed):
    assert answer(typed.split()) is None


def test_a_setting_that_is_not_known_is_answered_alike_with_and_without_jax():
    for name in ("lr", "vocab_sizee", "zzzzzzz", "batch_size", "ici_fsdp_paralelism"):
        with pytest.raises(ValueError) as error:
            read_words((f"{name}=1",))
        assert str(error.value) == answers.unknown_setting(name)


@pytest.mark.parametrize(
    "typed", [("train", "lr=1"), ("explain", "lr=1", "--hardware", "cpu"), ("bench", "layer", "olmoe", "lr=1")]
)
def test_a_mistyped_name_is_answered_without_loading_jax(typed):
    script = f"import sys; sys.argv = ['raggedmoe', *{typed}]; import raggedmoe_command as c\n"
    script += "try: c.main()\nexcept SystemExit as end: print(end.code, 'jax' in sys.modules, 'numpy' in sys.modules)"
    done = run(script=script)
    assert done.stdout == "2 False False\n"
    assert "did you mean learning_rate?" in done.stderr


@pytest.mark.ci
def test_the_package_runs_as_the_console_script_does():
    """With the environment that is prepared before JAX is there: in a process that has not loaded it."""
    done = run("lr=1", script="import runpy, sys; sys.argv[1:] = ['train', 'lr=1']; runpy.run_module('raggedmoe')")
    assert done.returncode == 2
    assert "did you mean learning_rate?" in done.stderr


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine with libtpu, and no device that computes."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "jax_plugins" else name)
    (tmp_path / "dev").mkdir()
    return tmp_path


def test_libtpu_is_not_asked_for_a_tpu_that_is_not_there(machine):
    environment = {}
    leave_out_missing_tpu(environment, machine)
    assert environment == {"JAX_PLATFORMS": "cpu"}


@pytest.mark.parametrize("device", ["dev/accel0", "dev/vfio/0", "dev/nvidia0", "sys/bus/pci/devices/0000:00:04/vendor"])
def test_where_there_may_be_an_accelerator_jax_looks_for_it(machine, device):
    (machine / device).parent.mkdir(parents=True, exist_ok=True)
    (machine / device).write_text("0x1ae0\n")
    environment = {}
    leave_out_missing_tpu(environment, machine)
    assert environment == {}


def test_platforms_that_are_named_and_plugins_are_left_alone(machine, monkeypatch):
    environment = {"JAX_PLATFORMS": "tpu,cpu"}
    leave_out_missing_tpu(environment, machine)
    assert environment == {"JAX_PLATFORMS": "tpu,cpu"}
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    environment = {}
    leave_out_missing_tpu(environment, machine)
    assert environment == {}


def test_programs_are_kept_in_the_users_cache_or_where_the_setting_says(tmp_path):
    for environment, root in (
        ({"XDG_CACHE_HOME": str(tmp_path / "xdg")}, tmp_path / "xdg" / "raggedmoe"),
        ({"RAGGEDMOE_CACHE": str(tmp_path / "mine")}, tmp_path / "mine"),
    ):
        folder = use_compilation_cache(environment)
        assert folder == root / f"programs-{machine_key()}"
        assert folder.is_dir()
        assert environment["JAX_COMPILATION_CACHE_DIR"] == str(folder)


@pytest.mark.parametrize("environment", [{"RAGGEDMOE_CACHE": "0"}, {"JAX_COMPILATION_CACHE_DIR": "theirs"}])
def test_no_programs_are_kept_if_the_user_says_so(environment):
    before = dict(environment)
    assert use_compilation_cache(environment) is None
    assert environment == before


def test_a_cache_that_cannot_be_written_is_none(tmp_path):
    (tmp_path / "file").write_text("")
    environment = {"RAGGEDMOE_CACHE": str(tmp_path / "file" / "folder")}
    assert use_compilation_cache(environment) is None
    assert "JAX_COMPILATION_CACHE_DIR" not in environment


def test_another_processor_or_number_of_cores_has_programs_of_its_own(tmp_path, monkeypatch):
    keys = {machine_key()}
    monkeypatch.setattr(compilation_cache, "CPUINFO", tmp_path / "cpuinfo")
    for flags in ("fpu avx2", "fpu avx2 avx512f"):
        (tmp_path / "cpuinfo").write_text(f"processor\t: 0\nflags\t\t: {flags}\ncpu MHz\t: 1\n\nprocessor\t: 1\n")
        keys.add(machine_key())
    same = machine_key()
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\nflags\t\t: {flags}\ncpu MHz\t: 2\n\nprocessor\t: 1\n")
    assert machine_key() == same
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(999), raising=False)
    keys.add(machine_key())
    assert len(keys) == 4


def test_the_cache_is_bounded_and_what_was_used_last_stays(tmp_path):
    folder = tmp_path / "programs-a"
    folder.mkdir()
    (tmp_path / "keep").write_bytes(b"x" * 100)  # not a program
    now = time.time()
    for days, name in ((0, "new"), (1, "recent"), (2, "older"), (40, "old")):
        (folder / name).write_bytes(b"x" * 10)
        os.utime(folder / name, (now - days * 24 * 3600,) * 2)
    remove_old_programs(tmp_path)
    assert {path.name for path in folder.iterdir()} == {"new", "recent", "older"}
    remove_old_programs(tmp_path, most_bytes=20)
    assert {path.name for path in folder.iterdir()} == {"new", "recent"}
    assert (tmp_path / "keep").exists()


@pytest.mark.ci
def test_the_second_start_of_a_run_compiles_nothing_and_gives_the_same_bits(tmp_path):
    curves, programs = [], []
    model = ("olmoe-tiny", "num_layers=1", "max_target_length=16", "per_device_batch_size=2", "dataset_type=synthetic")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    environment |= {"RAGGEDMOE_CACHE": str(tmp_path), "XLA_FLAGS": "--xla_backend_optimization_level=0"}
    for name in ("miss", "hit"):
        words = ("train", *model, "steps=3", "eval_steps=1", f"run_name={name}", f"base_output_directory={tmp_path}")
        script = "import raggedmoe_command; raggedmoe_command.main()"
        done = subprocess.run(
            [sys.executable, "-c", script, *words], env=environment, capture_output=True, text=True, timeout=300
        )
        assert (done.returncode, done.stderr) == (0, "")
        curves.append(curve(tmp_path / name))
        programs.append(sorted(path.name for path in tmp_path.glob("programs-*/*-cache")))
    assert curves[0] == curves[1]
    assert programs[0] == programs[1]
    assert programs[0]
