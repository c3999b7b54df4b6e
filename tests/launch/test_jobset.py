"""The manifest of a run on a cluster, against the schema that its controllers publish."""

import copy
import json
import re
import sys

import pytest
from pydantic import ValidationError

from raggedmoe.cli.main import main
from raggedmoe.launch.jobset import ClusterRun, manifest
from raggedmoe.launch.slices import parse_slice

DATA = "dataset_type=synthetic"
DEEPSEEK = ("--", "train", "deepseek-v3", "expert_parallelism=4", "fsdp_parallelism=-1")
TRAIN = (*DEEPSEEK, "base_output_directory=/runs/x", DATA)
RENDER = ("launch", "--render", "jobset", "--topology", "tpu7x:4x8x8", "--image", "registry/raggedmoe:0.1")
FULL = {
    "namespace": "ml",
    "queue": "research",
    "priority": "high",
    "claim": "runs:/runs",
    "xla_flags": "--xla_tpu_a=1",
    "num_slices": 2,
}


def check_schema(found: dict) -> None:
    """The types of all fields, and that there is no field that the schema does not know: those would be left out."""
    from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet  # over a second to import

    assert JobsetV1alpha2JobSet.from_dict(copy.deepcopy(found)).to_dict() == found


def cluster_run(topology: str = "v6e:4x4", **options) -> ClusterRun:
    return ClusterRun(
        name="run", image="registry/raggedmoe:0.1", command=("train", "demo"), slice=parse_slice(topology), **options
    )


def raggedmoe(monkeypatch, capsys, *arguments: str):
    """Exit code, standard output and standard error of the command."""
    monkeypatch.setattr(sys, "argv", ["raggedmoe", *arguments])
    with pytest.raises(SystemExit) as stop:
        main()
    return stop.value.code, *capsys.readouterr()


@pytest.mark.parametrize("topology", ["v4:2x2x2", "v5e:4x8", "v5p:4x4x8", "v6e:16x16", "tpu7x:4x8x8"])
@pytest.mark.parametrize("options", [{}, FULL], ids=["least", "full"])
def test_a_manifest_obeys_the_public_schema(topology, options):
    check_schema(manifest(cluster_run(topology, **options)))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("spec", "failurePolicy", "maxRestart"), 3),
        (("spec", "replicatedJobs", 0, "template", "spec", "template", "spec", "restartPolicies"), "Never"),
        (("spec", "replicatedJobs", 0, "template", "spec", "parallelism"), "4"),
        (("spec", "replicatedJobs", 0, "template", "spec", "completionMode"), "Sorted"),
        (("metadata", "labels"), ["a"]),
    ],
)
def test_the_check_finds_what_the_schema_does_not_have(path, value):
    found = manifest(cluster_run())
    inner = found
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    with pytest.raises((AssertionError, ValidationError)):
        check_schema(found)


def test_the_command_prints_the_run_that_was_asked_for(monkeypatch, capsys):
    options = ("--queue=research", "--priority=high", "--claim=runs:/runs", "--name=v3", "--namespace=ml")
    flags = "--xla_tpu_a=true --xla_tpu_b=2"
    code, out, error = raggedmoe(monkeypatch, capsys, *RENDER, *options, f"--xla-flags={flags}", *TRAIN)
    assert (code, error) == (0, "")
    found = json.loads(out)
    check_schema(found)
    assert found["metadata"]["name"] == "v3"
    assert found["metadata"]["namespace"] == "ml"
    assert found["metadata"]["labels"] == {
        "kueue.x-k8s.io/queue-name": "research",
        "kueue.x-k8s.io/priority-class": "high",
    }
    (jobs,) = found["spec"]["replicatedJobs"]
    job = jobs["template"]["spec"]
    assert (jobs["replicas"], job["parallelism"], job["completions"]) == (1, 64, 64)  # 256 chips, 4 a host
    pod = job["template"]["spec"]
    assert pod["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": "tpu7x",
        "cloud.google.com/gke-tpu-topology": "4x8x8",
    }
    (container,) = pod["containers"]
    assert container["command"] == ["raggedmoe", *TRAIN[1:]]
    assert container["resources"] == {"requests": {"google.com/tpu": "4"}, "limits": {"google.com/tpu": "4"}}
    variables = {entry["name"]: entry["value"] for entry in container["env"]}
    assert variables == {"RAGGEDMOE_COORDINATOR": "auto", "JAX_PLATFORMS": "tpu,cpu", "LIBTPU_INIT_ARGS": flags}
    assert container["volumeMounts"] == [{"name": "runs", "mountPath": "/runs"}]


def test_a_pod_never_starts_again_by_itself():
    spec = manifest(cluster_run("v5p:4x4x4"))["spec"]
    assert spec["replicatedJobs"][0]["template"]["spec"]["backoffLimit"] == 0
    assert spec["failurePolicy"]["maxRestarts"] > 0  # all of them do, together


def test_several_slices_are_several_jobs():
    spec = manifest(cluster_run("v5p:4x4x4", num_slices=3))["spec"]["replicatedJobs"][0]
    assert spec["replicas"] == 3
    assert spec["template"]["spec"]["parallelism"] == 16


def test_pods_of_several_slices_find_the_others_by_what_jobset_writes_on_them():
    found = manifest(cluster_run("v5p:4x4x4", num_slices=3))
    assert found["spec"]["coordinator"] == {"replicatedJob": "slice", "jobIndex": 0, "podIndex": 0}
    (container,) = found["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"]
    assert 8080 in [port["containerPort"] for port in container["ports"]]
    fields = {entry["name"]: entry.get("valueFrom", {}).get("fieldRef", {}) for entry in container["env"]}
    assert {name: field["fieldPath"] for name, field in fields.items() if field} == {
        "MEGASCALE_COORDINATOR_ADDRESS": "metadata.annotations['jobset.sigs.k8s.io/coordinator']",
        "MEGASCALE_NUM_SLICES": "metadata.annotations['jobset.sigs.k8s.io/replicatedjob-replicas']",
        "MEGASCALE_SLICE_ID": "metadata.annotations['jobset.sigs.k8s.io/job-index']",
    }
    assert "MEGASCALE" not in json.dumps(manifest(cluster_run("v5p:4x4x4")))


@pytest.mark.parametrize(("layout", "hosts", "slices"), [("4x4x4", 16, 1), ("4x8x8", 64, 1), ("4x4x8", 32, 3)])
def test_a_composed_slice_is_whole_blocks_of_chips_and_no_pool_of_nodes(layout, hosts, slices):
    found = manifest(cluster_run(f"tpu7x:{layout}", queue="research", composed=True, num_slices=slices))
    check_schema(found)
    assert "annotations" not in found["metadata"]  # one job in one pool of nodes: it needs several
    (jobs,) = found["spec"]["replicatedJobs"]
    job = jobs["template"]["spec"]
    assert (jobs["replicas"], job["parallelism"]) == (slices, hosts)
    assert job["template"]["metadata"]["annotations"] == {
        "cloud.google.com/gke-tpu-slice-topology": layout,
        "kueue.x-k8s.io/podset-required-topology": "cloud.google.com/gce-topology-block",
        "kueue.x-k8s.io/podset-slice-required-topology": "cloud.google.com/gke-tpu-partition-4x4x4-id",
        "kueue.x-k8s.io/podset-slice-size": "16",  # hosts of 4 chips in 64
    }
    assert job["template"]["spec"]["nodeSelector"] == {"cloud.google.com/gke-tpu-accelerator": "tpu7x"}


def test_a_slice_that_is_not_composed_says_nothing_of_blocks():
    text = json.dumps(manifest(cluster_run("tpu7x:4x8x8", queue="research")))
    assert "podset" not in text
    assert "gke-tpu-slice-topology" not in text


def test_the_command_takes_composed(monkeypatch, capsys):
    code, out, _ = raggedmoe(
        monkeypatch, capsys, *RENDER, "--composed", "--queue=research", "--claim=runs:/runs", *TRAIN
    )
    assert code == 0
    assert "podset-slice-size" in out


@pytest.mark.parametrize(
    ("topology", "hosts", "chips_per_host", "devices"),
    [
        ("v4:2x2x1", 1, 4, 4),
        ("v5e:1x1", 1, 1, 1),
        ("v5e:2x4", 1, 8, 8),
        ("v5e:4x4", 4, 4, 16),
        ("v5p:4x4x4", 16, 4, 64),
        ("v6e:2x4", 1, 8, 8),
        ("v6e:16x16", 64, 4, 256),
        ("tpu7x:2x2x1", 1, 4, 8),
        ("tpu7x:4x8x8", 64, 4, 512),
    ],
)
def test_hosts_and_devices_of_a_slice(topology, hosts, chips_per_host, devices):
    found = parse_slice(topology)
    assert (found.num_hosts, found.chips_per_host, found.num_devices) == (hosts, chips_per_host, devices)


def test_eight_chips_may_be_two_hosts():
    assert parse_slice("v6e:2x4", 4).num_hosts == 2
    with pytest.raises(ValueError, match="expected 8 or 4 chips per host, got 2"):
        parse_slice("v6e:2x4", 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "Run_1"}, "--name: expected lower-case letters.*got 'Run_1'"),
        ({"image": ""}, "--image: expected a container image"),
        ({"priority": "high"}, "--priority high: expected --queue as well"),
        ({"queue": "a b"}, "--queue: expected lower-case letters.*got 'a b'"),
        ({"secret": "A_B"}, "--secret: expected lower-case letters.*got 'A_B'"),
        ({"service_account": ""}, "--service-account: expected lower-case letters"),
        ({"claim": "runs"}, "--claim: expected NAME:/PATH.*got 'runs'"),
        ({"num_slices": 0}, "expected --slices >= 1, got 0"),
        ({"slice": parse_slice("v6e:2x2"), "num_slices": 2}, "expected slices of several hosts, got 2x2"),
        ({"max_restarts": -1}, "expected --max-restarts >= 0, got -1"),
        ({"composed": True, "queue": "q"}, "--composed: expected slices of tpu7x made of 4x4x4 blocks.*got v6e:4x4"),
        (
            {"composed": True, "queue": "q", "slice": parse_slice("v5p:4x8x8")},
            "--composed: expected slices of tpu7x.*got v5p:4x8x8",
        ),
        (
            {"composed": True, "queue": "q", "slice": parse_slice("tpu7x:2x4x4")},
            "made of 4x4x4 blocks.*got tpu7x:2x4x4",
        ),
        ({"composed": True, "slice": parse_slice("tpu7x:4x8x8")}, "--composed: expected --queue as well"),
    ],
)
def test_a_run_that_cannot_be_rendered_is_refused(options, message):
    given = {"name": "run", "image": "i", "command": ("train",), "slice": parse_slice("v6e:4x4"), **options}
    with pytest.raises(ValueError, match=message):
        ClusterRun(**given)


@pytest.mark.parametrize("name", ["tpu7x:4x8", "tpu7x:8x4x4", "tpu7x:3x4x4", "v6e:3x3", "v6e:4x4x4", "v7:2x2", "v6e"])
def test_a_topology_that_is_not_offered_is_refused(name):
    with pytest.raises(ValueError, match=r"topology .*: expected"):
        parse_slice(name)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("launch",), "expected a command after --.*got none"),
        (("launch", "--processes", "2"), "expected a command after --.*got none"),
        (("launch", "--", "train"), "expected --processes N, or --render jobset; got neither"),
        (("launch", "--processes", "0", "--", "train"), "expected --processes >= 1, got 0"),
        (("launch", "--processes", "2", "--", "bench"), "unknown command to launch, 'bench': expected one of train"),
        (
            ("launch", "--processes", "4", "--", "train", "expert_parallelism=2"),
            "the degrees use 2 devices, which 4 processes cannot share evenly",
        ),
        (("launch", "--render", "helm", "--", "train"), "unknown form to render, 'helm': expected one of jobset"),
        (("launch", "--render", "jobset", "--", "train"), "expected --topology, such as tpu7x:4x8x8, and --image"),
        ((*RENDER, "--processes", "2", "--", "train"), "expected no --processes"),
        ((*RENDER, "--", "train", "step=3"), "unknown setting 'step'"),
        ((*RENDER, *TRAIN[:-1]), "deepseek-v3 is no model of bytes: expected the data"),
        ((*RENDER, "--", "train", "deepseek-v3"), "the degrees use 1 devices, but 1 × tpu7x:4x8x8 has 512"),
        ((*RENDER, "--", "train", "fsdp_parallelism=1024"), "fsdp_parallelism=1024 = 1024 devices, but there are 512"),
        (
            (*RENDER, "--", "train", "deepseek-v3", "expert_parallelism=512"),
            r"expert_parallelism=512 does not divide num_experts=256",
        ),
        (
            (*RENDER, "--slices", "2", *TRAIN, "dcn_data_parallelism=1"),
            "dcn_data_parallelism=1 cannot be used with devices of 2 slices: -1 takes them all",
        ),
        (
            ("launch", "--processes", "2", "--devices-per-process", "0", "--", "train"),
            "devices-per-process >= 1, got 0",
        ),
        ((*RENDER, *TRAIN, "steps=-3"), "steps"),
        ((*RENDER, *TRAIN, "learning_rate=-1"), "learning_rate"),
        (
            (*RENDER, "--claim", "runs:/runs", *DEEPSEEK, DATA, "base_output_directory=/runs/../tmp"),
            "base_output_directory=/tmp: expected a folder in /runs",
        ),
        (
            (*RENDER, *DEEPSEEK, DATA, "base_output_directory=gs://bucket/runs"),
            "base_output_directory: gs://bucket/runs: expected s3://",
        ),
        ((*RENDER, *TRAIN), "expected --claim NAME:/PATH for the checkpoints of 64 hosts"),
        ((*RENDER, "--claim", "runs:/disk", *TRAIN), "base_output_directory=/runs/x: expected a folder in /disk"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(arguments, message, monkeypatch, capsys):
    code, out, error = raggedmoe(monkeypatch, capsys, *arguments)
    assert (code, out) == (2, "")
    assert error.startswith("raggedmoe: ")
    assert error.count("\n") == 1
    assert re.search(message, error), error


def test_a_host_without_a_lasting_disk_is_told_what_that_means(monkeypatch, capsys):
    one_host = ("launch", "--render", "jobset", "--topology", "v6e:2x2", "--image", "registry/raggedmoe:0.1")
    train = ("--", "train", "olmoe-1b-7b", "fsdp_parallelism=-1", DATA)
    code, out, error = raggedmoe(monkeypatch, capsys, *one_host, *train)
    assert code == 0
    assert json.loads(out)["kind"] == "JobSet"
    assert "without --claim, pods write to disks of their own" in error


@pytest.mark.parametrize("option", ["--secret=runs-s3", "--service-account=trainer", None])
def test_a_folder_in_an_object_store_needs_no_claim_but_credentials(monkeypatch, capsys, option):
    words = (*DEEPSEEK, DATA, "base_output_directory=s3://bucket/runs")
    options = () if option is None else (option,)
    code, out, error = raggedmoe(monkeypatch, capsys, *RENDER, *options, *words)
    assert code == 0
    found = json.loads(out)
    check_schema(found)
    pod = found["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert "volumes" not in pod
    assert "volumeMounts" not in container
    assert container["command"] == ["raggedmoe", *words[1:]]
    assert container.get("envFrom") == ([{"secretRef": {"name": "runs-s3"}}] if option == "--secret=runs-s3" else None)
    assert pod.get("serviceAccountName") == ("trainer" if option == "--service-account=trainer" else None)
    assert ("pods have their nodes' credentials for s3://bucket/runs, or none" in error) == (option is None)


def test_what_pods_would_not_find_is_said(monkeypatch, capsys):
    words = (*DEEPSEEK, "dataset_type=text", "dataset_path=s3://bucket/text,/data/text", "tokenizer_path=/runs/t.json")
    words = (*words, "eval_paths=news=/data/news,old=s3://bucket/old,mine=/runs/mine")
    code, _, error = raggedmoe(monkeypatch, capsys, *RENDER, *words, "base_output_directory=s3://bucket/runs")
    assert code == 0
    for word in ("dataset_path=/data/text", "tokenizer_path=/runs/t.json", "eval_paths=/data/news"):
        assert f"{word}: there is no --claim: pods find it only if the image has it" in error
    assert "s3://bucket/text:" not in error
    assert "s3://bucket/old:" not in error
    claimed = (*RENDER, "--claim", "runs:/runs", *words, "base_output_directory=/runs")
    code, _, error = raggedmoe(monkeypatch, capsys, *claimed)
    assert code == 0
    assert "dataset_path=/data/text: it is not in /runs, where --claim is mounted" in error
    assert "eval_paths=/data/news: it is not in /runs, where --claim is mounted" in error
    assert "eval_paths=/runs/mine" not in error
    assert "tokenizer_path" not in error


def test_a_model_that_only_the_pods_have_is_rendered_with_a_note(monkeypatch, capsys):
    words = (DATA, "fsdp_parallelism=-1", "base_output_directory=/runs")
    mounted = (*RENDER, "--claim", "runs:/runs", "--", "train")
    code, out, error = raggedmoe(monkeypatch, capsys, *mounted, "/runs/hf", *words)
    assert code == 0
    assert json.loads(out)["kind"] == "JobSet"
    assert "model_name=/runs/hf is not on this machine: what depends on the model is checked when the pods" in error
    code, _, error = raggedmoe(monkeypatch, capsys, *mounted, "deepseek-v3", "load_parameters_path=/runs/hf", *words)
    assert code == 0
    assert "load_parameters_path=/runs/hf is not on this machine" in error
    code, _, error = raggedmoe(monkeypatch, capsys, *mounted, "/elsewhere/hf", *words)
    assert code == 2
    assert "/elsewhere/hf: expected a preset or a folder with a model, found neither" in error
    code, _, error = raggedmoe(monkeypatch, capsys, *mounted, "/runs/hf", *words[:1], *words[2:])
    assert "the degrees use 1 devices, but 1 × tpu7x:4x8x8 has 512" in error


def test_hosts_need_no_shared_disk_for_a_run_without_checkpoints(monkeypatch, capsys):
    code, out, error = raggedmoe(monkeypatch, capsys, *RENDER, *TRAIN, "enable_checkpointing=false")
    assert code == 0
    assert json.loads(out)["kind"] == "JobSet"
    assert "after a failure the run begins anew" in error


@pytest.mark.parametrize(
    ("topology", "blocks"), [("tpu7x:4x8x8", 4), ("tpu7x:4x4x4", 1), ("tpu7x:2x4x4", 0), ("v6e:8x8", 0)]
)
def test_a_slice_is_made_of_whole_blocks_where_no_side_is_shorter_than_one(topology, blocks):
    assert parse_slice(topology).num_blocks == blocks
