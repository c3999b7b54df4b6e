"""`raggedmoe launch`, which runs several processes here, or prints the manifest of a run on a cluster."""

import json
import os
import sys
from pathlib import Path
from typing import Annotated

import tyro

from raggedmoe.hardware import HARDWARE
from raggedmoe.launch.jobset import ClusterRun, manifest
from raggedmoe.launch.launcher import LocalRun
from raggedmoe.launch.launcher import launch as launch_here
from raggedmoe.launch.slices import parse_slice
from raggedmoe.names import unknown
from raggedmoe.storage import ObjectPath, as_path
from raggedmoe.train.settings.config import TrainConfig
from raggedmoe.train.settings.model_defaults import check_data
from raggedmoe.train.settings.resolve import resolve
from raggedmoe.train.settings.sections import BYTES
from raggedmoe.train.settings.words import read_words

COMMANDS = ("train",)  # those that join the other processes
RENDER_FORMATS = ("jobset",)
RAGGEDMOE_COMMAND = (sys.executable, "-c", "from raggedmoe.cli.main import main; main()")


def launch(
    command: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="-- train [KEY=VALUE ...]")] = (),
    processes: int | None = None,
    devices_per_process: int | None = None,
    grace: float = 10.0,
    render: str | None = None,
    topology: str | None = None,
    slices: int = 1,
    chips_per_host: int | None = None,
    image: str | None = None,
    name: str = "raggedmoe",
    namespace: str | None = None,
    queue: str | None = None,
    priority: str | None = None,
    claim: str | None = None,
    secret: str | None = None,
    service_account: str | None = None,
    xla_flags: str | None = None,
    max_restarts: int = 10,
    composed: bool = False,
) -> int:
    """Train with several processes on this machine, or print a manifest for a cluster.

    On this machine it starts --processes processes of `raggedmoe train` with the same arguments. It shows the
    output of process 0, and the errors of all.

      raggedmoe launch --processes 2 -- train olmoe-tiny expert_parallelism=4 data_parallelism=2

    If a process fails, the others end within a minute (mostly at once). The command prints which process it was and its
    last lines, and exits with its code. The same command resumes from the last checkpoint, also with fewer processes.
    Ctrl-C and SIGTERM are passed on to all processes, which save and end with code 75. Exit codes are
    those of `raggedmoe train`.

    For a cluster, --render jobset prints a Kubernetes JobSet for GKE, with Kueue's labels. Nothing is started.

      raggedmoe launch --render jobset --topology tpu7x:4x8x8 --image registry/raggedmoe:0.1 --queue research
        --claim runs:/runs -- train deepseek-v3 expert_parallelism=4 fsdp_parallelism=-1 base_output_directory=/runs
        dataset_type=text dataset_path=/runs/text tokenizer_path=/runs/tokenizer.json > job.json
      kubectl apply -f job.json

    With base_output_directory=s3://bucket/folder no claim is needed, but credentials: --secret or --service-account.

    The degrees of parallelism must use all devices of the slices and divide the model, which is checked first. More is
    in docs/launch.md.

    Args:
        command: after --, what each process runs: train and its settings.
        processes: number of processes on this machine.
        devices_per_process: CPU devices of each process; by default its share of those that the degrees ask for.
        grace: seconds between SIGTERM and SIGKILL, for processes that do not end by themselves when one has failed.
        render: jobset prints a manifest instead of starting processes.
        topology: chip and topology of a slice, such as v6e:4x4 or tpu7x:4x8x8.
        slices: number of slices, connected by the data centre's network.
        chips_per_host: chips of a host, for v5e:2x4 and v6e:2x4, which are one host of 8 chips or two of 4.
        image: container image with raggedmoe and its extras train and tpu, and s3 for object storage.
        name: name of the JobSet.
        namespace: Kubernetes namespace of the JobSet.
        queue: LocalQueue of Kueue, which starts the run when there is room.
        priority: WorkloadPriorityClass of Kueue.
        claim: NAME:/PATH of a PersistentVolumeClaim that all pods can write to, and where they mount it.
        secret: Kubernetes Secret whose entries become environment variables of the pods, such as AWS_ACCESS_KEY_ID.
        service_account: Kubernetes ServiceAccount of the pods, which may have a role at the object store.
        xla_flags: flags of the TPU compiler (LIBTPU_INIT_ARGS).
        max_restarts: number of times that the run resumes from its checkpoint after a failure.
        composed: slices of tpu7x are composed of 4x4x4 blocks when Kueue admits the run (GKE's dynamic slicing).
    """
    if not command:
        raise ValueError(
            "expected a command after --, as in `raggedmoe launch --processes 2 -- train data_parallelism=2`; got none"
        )
    if command[0] not in COMMANDS:
        raise unknown("command to launch,", command[0], COMMANDS)
    if render is None:
        if processes is None:
            raise ValueError("expected --processes N, or --render jobset; got neither")
        return launch_here(
            LocalRun(
                command=(*RAGGEDMOE_COMMAND, *command),
                num_processes=processes,
                devices_per_process=_devices_each(command[1:], processes)
                if devices_per_process is None
                else devices_per_process,
                grace=grace,
            )
        )
    if render not in RENDER_FORMATS:
        raise unknown("form to render,", render, RENDER_FORMATS)
    if topology is None or image is None:
        raise ValueError("--render jobset: expected --topology, such as tpu7x:4x8x8, and --image of a container")
    if processes is not None or devices_per_process is not None:
        raise ValueError("--render jobset: expected no --processes or --devices-per-process; --topology says both")
    cluster_run = ClusterRun(
        name=name,
        image=image,
        command=command,
        slice=parse_slice(topology, chips_per_host),
        num_slices=slices,
        namespace=namespace,
        queue=queue,
        priority=priority,
        claim=claim,
        secret=secret,
        service_account=service_account,
        xla_flags=xla_flags,
        max_restarts=max_restarts,
        composed=composed,
    )
    for note in _check_cluster_run(cluster_run):
        print(f"raggedmoe: {note}", file=sys.stderr)
    print(json.dumps(manifest(cluster_run), indent=2))
    return 0


def _devices_each(words: tuple[str, ...], num_processes: int) -> int | None:
    """Return each process's share of the devices that the degrees ask for; None if they do not say how many."""
    plan = read_words(words).mesh.plan
    if plan.open or num_processes < 1:
        return None
    if plan.least.num_devices % num_processes:
        raise ValueError(
            f"the degrees use {plan.least.num_devices} devices, which {num_processes} processes cannot share evenly; "
            "use degrees whose product is a multiple of --processes"
        )
    return plan.least.num_devices // num_processes


def _check_cluster_run(run: ClusterRun) -> list[str]:
    """Refuse settings that cannot run on these slices, as the pods would. Return notes for the user."""
    config = read_words(run.command[1:])
    num_devices = run.slice.num_devices * run.num_slices
    absent = _absent_models(config, run)
    resolved = None if absent else resolve(config, HARDWARE[run.slice.chip], num_devices, run.num_slices)
    plan = config.mesh.plan.resolve(num_devices, run.num_slices) if resolved is None else resolved.plan
    if plan.num_devices != num_devices:
        raise ValueError(
            f"the degrees use {plan.num_devices} devices, but {run.num_slices} × {run.slice.name} has "
            f"{num_devices}; expected all of them: set one degree to -1, or use a smaller topology"
        )
    if resolved is not None:
        check_data(config, resolved.step.model)
    unchecked = [
        f"{word} is not on this machine: what depends on the model is checked when the pods begin" for word in absent
    ]
    return [*_check_run_folder(config, run), *unchecked, *_outside_the_claim(config, run)]


def _check_run_folder(config: TrainConfig, run: ClusterRun) -> list[str]:
    """Refuse a folder of the run that its pods cannot share. Return notes for the user."""
    if not config.checkpoints.enable_checkpointing:
        return ["enable_checkpointing=false: after a failure the run begins anew"]
    place = as_path(config.run.base_output_directory)
    if isinstance(place, ObjectPath):
        if run.secret or run.service_account:
            return []
        return [f"without --secret or --service-account, pods have their nodes' credentials for {place}, or none"]
    num_hosts = run.slice.num_hosts * run.num_slices
    if run.mount is None and num_hosts > 1:
        raise ValueError(
            f"expected --claim NAME:/PATH for the checkpoints of {num_hosts} hosts, which each write their own parts, "
            "into a folder that all see; got none. Make a PersistentVolumeClaim, use base_output_directory=s3://…, or "
            "enable_checkpointing=false"
        )
    if run.mount is None:
        return ["without --claim, pods write to disks of their own that end with them: a run cannot go on"]
    if not _is_mounted(place, run):
        folder = os.path.normpath(place)
        raise ValueError(f"base_output_directory={folder}: expected a folder in {run.mount}, where --claim is mounted")
    return []


def _is_mounted(place: Path, run: ClusterRun) -> bool:
    """Tell whether a place of the pods is where the claim is mounted."""
    return run.mount is not None and Path(os.path.normpath(place)).is_relative_to(os.path.normpath(run.mount))


def _absent_models(config: TrainConfig, run: ClusterRun) -> list[str]:
    """List the folders of models that the pods will find where the claim is mounted, and this machine has not."""
    start = config.run.load_parameters_path
    folders = {
        "model_name": config.model_folder,
        "load_parameters_path": None if start is None else as_path(start),
    }
    return [
        f"{name}={folder}"
        for name, folder in folders.items()
        if isinstance(folder, Path) and _is_mounted(folder, run) and not folder.is_dir()
    ]


def _outside_the_claim(config: TrainConfig, run: ClusterRun) -> list[str]:
    """Say which files the run reads that are neither where the claim is mounted nor in an object store."""
    data, tokenizer = config.data, config.data.tokenizer_path
    read: dict[str, tuple[str, ...]] = {
        "model_name": () if config.model_folder is None else (config.model_name,),
        "load_parameters_path": tuple(filter(None, (config.run.load_parameters_path,))),
        "init_from": tuple(filter(None, (config.run.init_from,))),
        "dataset_path": data.dataset_path,
        "eval_paths": tuple(path for paths in data.named_eval_paths.values() for path in paths),
        "tokenizer_path": () if tokenizer in (None, BYTES) else (str(tokenizer),),
    }
    where = "there is no --claim" if run.mount is None else f"it is not in {run.mount}, where --claim is mounted"
    return [
        f"{name}={place}: {where}: pods find it only if the image has it"
        for name, places in read.items()
        for place in places
        if isinstance(path := as_path(place), Path) and not _is_mounted(path, run)
    ]
