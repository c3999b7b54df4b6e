"""A run on a cluster as a Kubernetes JobSet: one job for each slice, one pod for each of its hosts.

GKE tells each pod its number and the names of the others (TPU_WORKER_ID, TPU_WORKER_HOSTNAMES), where JAX looks for
them. The manifest is a plain dict, and JSON is YAML that kubectl takes.
"""

import re
from dataclasses import dataclass
from typing import Any

from raggedmoe.launch.processes import AUTO, COORDINATOR
from raggedmoe.launch.slices import BLOCK_TOPOLOGY, COMPOSED_CHIPS, Slice

MEGASCALE_PORT, TPU_PORT, COORDINATOR_PORT = 8080, 8471, 8482  # between slices; libtpu's; JAX's coordinator
# Exit codes of `raggedmoe train` after which a restart would only fail again: a wrong setting, losses not finite.
FINAL_CODES = (2, 3)
# How libtpu, and JAX, learn of other slices: from what JobSet writes on every pod.
MEGASCALE_VARIABLES = {
    "MEGASCALE_COORDINATOR_ADDRESS": "jobset.sigs.k8s.io/coordinator",
    "MEGASCALE_NUM_SLICES": "jobset.sigs.k8s.io/replicatedjob-replicas",
    "MEGASCALE_SLICE_ID": "jobset.sigs.k8s.io/job-index",
}
SAVING_SECONDS = 300  # between SIGTERM and SIGKILL
LONGEST_NAME = 40  # pods are called NAME-slice-JOB-POD and five letters, in 63
# Labels of nodes, which are the levels of Kueue's Topology: blocks of the data centre, blocks of 4x4x4 chips in them.
DATA_CENTRE_BLOCK = "cloud.google.com/gce-topology-block"
CHIP_BLOCK = f"cloud.google.com/gke-tpu-partition-{BLOCK_TOPOLOGY}-id"


@dataclass(frozen=True, kw_only=True)
class ClusterRun:
    """A run on a cluster: the command, the slices that it runs on, and what Kubernetes and Kueue are told about it."""

    name: str
    image: str  # a container image that has raggedmoe
    command: tuple[str, ...]  # words after `raggedmoe`
    slice: Slice
    num_slices: int = 1
    namespace: str | None = None
    queue: str | None = None  # Kueue's LocalQueue
    priority: str | None = None  # Kueue's WorkloadPriorityClass
    claim: str | None = None  # NAME:/PATH of a PersistentVolumeClaim
    secret: str | None = None  # Kubernetes' Secret whose entries are environment variables, such as AWS_ACCESS_KEY_ID
    service_account: str | None = None  # Kubernetes' ServiceAccount, which may have a role at the object store
    xla_flags: str | None = None  # for the TPU compiler
    max_restarts: int = 10
    composed: bool = False  # slices are composed of blocks of 4x4x4 chips when Kueue admits the run

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", self.name) or len(self.name) > LONGEST_NAME:
            raise ValueError(
                f"--name: expected lower-case letters, digits and '-', {LONGEST_NAME} at most, beginning with a letter "
                f"and not ending with '-'; got {self.name!r}"
            )
        named = {
            "namespace": self.namespace,
            "queue": self.queue,
            "priority": self.priority,
            "secret": self.secret,
            "service-account": self.service_account,
        }
        for option, value in named.items():
            if value is not None and not re.fullmatch(r"[a-z0-9]([-.a-z0-9]{0,61}[a-z0-9])?", value):
                raise ValueError(f"--{option}: expected lower-case letters, digits, '-' and '.', got {value!r}")
        if not self.image or re.search(r"\s", self.image):
            raise ValueError(f"--image: expected a container image such as registry/raggedmoe:0.1, got {self.image!r}")
        if self.claim is not None and not re.fullmatch(r"[a-z0-9]([-.a-z0-9]*[a-z0-9])?:/[^:\s]+", self.claim):
            raise ValueError(f"--claim: expected NAME:/PATH of a PersistentVolumeClaim, got {self.claim!r}")
        if self.priority is not None and self.queue is None:
            raise ValueError(f"--priority {self.priority}: expected --queue as well, as priorities are Kueue's")
        if self.num_slices < 1:
            raise ValueError(f"expected --slices >= 1, got {self.num_slices}")
        if self.num_slices > 1 and self.slice.num_hosts == 1:
            raise ValueError(f"--slices {self.num_slices}: expected slices of several hosts, got {self.slice.topology}")
        if self.max_restarts < 0:
            raise ValueError(f"expected --max-restarts >= 0, got {self.max_restarts}")
        if self.composed and (self.slice.chip not in COMPOSED_CHIPS or not self.slice.num_blocks):
            raise ValueError(
                f"--composed: expected slices of {', '.join(COMPOSED_CHIPS)} made of {BLOCK_TOPOLOGY} blocks, such as "
                f"{COMPOSED_CHIPS[0]}:4x8x8, got {self.slice.name}; leave --composed out for a pool of nodes that is "
                "a slice already"
            )
        if self.composed and self.queue is None:
            raise ValueError("--composed: expected --queue as well, as Kueue has the slices made")

    @property
    def mount(self) -> str | None:
        """The path at which the pods mount the claim; None without a claim."""
        return None if self.claim is None else self.claim.partition(":")[2]


def manifest(run: ClusterRun) -> dict[str, Any]:
    """Make the manifest of the JobSet."""
    labels = {"kueue.x-k8s.io/queue-name": run.queue, "kueue.x-k8s.io/priority-class": run.priority}
    metadata = {
        "name": run.name,
        "namespace": run.namespace,
        "labels": {name: value for name, value in labels.items() if value} or None,
        # A slice is a pool of nodes: a job has one for itself. A composed one is several pools.
        "annotations": None
        if run.composed
        else {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"},
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {name: value for name, value in metadata.items() if value is not None},
        "spec": {
            # All pods start again and go on from the checkpoint, unless a job failed by its podFailurePolicy.
            "failurePolicy": {
                "maxRestarts": run.max_restarts,
                "rules": [{"name": "final", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}],
            },
            **({"coordinator": {"replicatedJob": "slice", "jobIndex": 0, "podIndex": 0}} if run.num_slices > 1 else {}),
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "replicatedJobs": [{"name": "slice", "replicas": run.num_slices, "template": {"spec": _job(run)}}],
        },
    }


def _job(run: ClusterRun) -> dict[str, Any]:
    """Make the job of one slice."""
    codes = {"containerName": "train", "operator": "In", "values": list(FINAL_CODES)}
    claimed = {"claimName": run.claim.partition(":")[0]} if run.claim else None
    return {
        "parallelism": run.slice.num_hosts,
        "completions": run.slice.num_hosts,
        "completionMode": "Indexed",
        "backoffLimit": 0,  # a pod alone cannot start again: its slice's others wait in a collective
        "podFailurePolicy": {"rules": [{"action": "FailJob", "onExitCodes": codes}]},
        "template": {
            **({"metadata": {"annotations": _composition(run)}} if run.composed else {}),
            "spec": {
                "restartPolicy": "Never",
                "terminationGracePeriodSeconds": SAVING_SECONDS,
                "nodeSelector": _nodes(run),
                "containers": [_container(run)],
                **({"serviceAccountName": run.service_account} if run.service_account else {}),
                **({"volumes": [{"name": "runs", "persistentVolumeClaim": claimed}]} if claimed else {}),
            },
        },
    }


def _nodes(run: ClusterRun) -> dict[str, str]:
    """Make the labels of the nodes that a pod may run on. Nodes of a block lack the topology of the slice-to-be."""
    topology = {} if run.composed else {"cloud.google.com/gke-tpu-topology": run.slice.topology}
    return {"cloud.google.com/gke-tpu-accelerator": run.slice.accelerator, **topology}


def _composition(run: ClusterRun) -> dict[str, str]:
    """Make the annotations by which Kueue finds hosts in whole blocks of chips, all in one block of the data centre."""
    return {
        "cloud.google.com/gke-tpu-slice-topology": run.slice.topology,
        "kueue.x-k8s.io/podset-required-topology": DATA_CENTRE_BLOCK,
        "kueue.x-k8s.io/podset-slice-required-topology": CHIP_BLOCK,
        "kueue.x-k8s.io/podset-slice-size": str(run.slice.block_hosts),
    }


def _container(run: ClusterRun) -> dict[str, Any]:
    """Make the container of a pod."""
    # Without a TPU, an error: not a run on the host.
    variables = {COORDINATOR: AUTO, "JAX_PLATFORMS": "tpu,cpu", "LIBTPU_INIT_ARGS": run.xla_flags}
    ports = (TPU_PORT, COORDINATOR_PORT, *((MEGASCALE_PORT,) if run.num_slices > 1 else ()))
    chips = {"google.com/tpu": str(run.slice.chips_per_host)}
    return {
        "name": "train",
        "image": run.image,
        "command": ["raggedmoe", *run.command],
        "env": [{"name": name, "value": value} for name, value in variables.items() if value] + _megascale(run),
        "ports": [{"containerPort": port, "protocol": "TCP"} for port in ports],
        "resources": {"requests": chips, "limits": chips},
        **({"envFrom": [{"secretRef": {"name": run.secret}}]} if run.secret else {}),
        **({"volumeMounts": [{"name": "runs", "mountPath": run.mount}]} if run.mount else {}),
    }


def _megascale(run: ClusterRun) -> list[dict[str, Any]]:
    """Make the variables of a pod by which it finds the other slices; one slice has none."""
    return [
        {"name": name, "valueFrom": {"fieldRef": {"fieldPath": f"metadata.annotations['{annotation}']"}}}
        for name, annotation in (MEGASCALE_VARIABLES.items() if run.num_slices > 1 else ())
    ]
