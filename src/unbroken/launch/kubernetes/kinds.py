"""The documents of each kind of manifest: a Job, a JobSet, a PyTorchJob, and what each needs beside it.

What an exit code means is decided once: a clean stop and a lost machine are started again and count for nothing, a
crash is started again and counts, and what a person must decide is never started again.
"""

from typing import Final

from unbroken.launch.kubernetes.pods import (
    INSTANCE,
    PORT,
    STOPPED,
    Document,
    command_line,
    config_name,
    labels,
    meeting_by_index,
    meeting_by_operator,
    metadata,
    pod_template,
)
from unbroken.launch.kubernetes.wanted import SUFFIXES, Wanted

# Usage, damage, data, no usable checkpoint, not exact, loss not finite: the next pod would end the same way.
LEFT_TO_A_PERSON: Final = (2, 3, 4, 5, 6, 8)
# The training operator starts a pod again only if its exit code is 128 or more.
STOPPED_FOR_OPERATOR: Final = 143
_TRAIN: Final = "train"
_GROUP: Final = "node"


def documents(wanted: Wanted) -> list[Document]:
    """Every document of a manifest, in the order a cluster is to be given them."""
    made = {"job": _job, "jobset": _job_set, "pytorchjob": _pytorch_job}[wanted.kind](wanted)
    return [*_claim(wanted), *_config(wanted), *made]


def _job(wanted: Wanted) -> list[Document]:
    command = command_line(wanted, meeting_by_index(wanted, f"{wanted.name}{SUFFIXES['job']}0.{wanted.name}"))
    spec = _job_spec(wanted, command, backoff_limit=wanted.restarts)
    service: list[Document] = []
    if wanted.nodes > 1:
        spec["template"]["spec"]["subdomain"] = wanted.name
        service = [_service(wanted)]
    return [*service, {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata(wanted), "spec": spec}]


def _job_spec(wanted: Wanted, command: list[str], *, backoff_limit: int) -> Document:
    template = pod_template(wanted, command, container=_TRAIN, is_indexed=True)
    # A policy on exit codes needs pods that the kubelet does not start again by itself.
    template["spec"] = {"restartPolicy": "Never", **template["spec"]}
    return {
        "completionMode": "Indexed",
        "completions": wanted.nodes,
        "parallelism": wanted.nodes,
        "backoffLimit": backoff_limit,
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {"rules": _rules()},
        "template": template,
    }


def _rules() -> list[Document]:
    # The first rule that fits decides: a pod that halts while its machine is drained has halted all the same.
    return [
        {"action": "FailJob", "onExitCodes": _exit_codes(*LEFT_TO_A_PERSON)},
        {"action": "Ignore", "onExitCodes": _exit_codes(STOPPED)},
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
    ]


def _exit_codes(*codes: int) -> Document:
    return {"containerName": _TRAIN, "operator": "In", "values": sorted(codes)}


def _job_set(wanted: Wanted) -> list[Document]:
    first = f"{wanted.name}{SUFFIXES['jobset']}0.{wanted.name}"
    # No second pod in the same job: where one rank is lost the others end too, and all are started together.
    spec = _job_spec(wanted, command_line(wanted, meeting_by_index(wanted, first)), backoff_limit=0)
    return [
        {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": metadata(wanted),
            "spec": {
                "network": {"enableDNSHostnames": True, "subdomain": wanted.name, "publishNotReadyAddresses": True},
                "failurePolicy": {
                    "maxRestarts": wanted.restarts,
                    "rules": [
                        {
                            "name": "leftToAPerson",
                            "action": "FailJobSet",
                            "onJobFailureReasons": ["PodFailurePolicy"],
                        }
                    ],
                },
                "replicatedJobs": [{"name": _GROUP, "replicas": 1, "template": {"spec": spec}}],
            },
        }
    ]


def _pytorch_job(wanted: Wanted) -> list[Document]:
    command = command_line(wanted, meeting_by_operator(wanted), STOPPED_FOR_OPERATOR, wanted.restarts)
    replicas = {"Master": _replicas(wanted, command, 1)}
    if wanted.nodes > 1:
        replicas["Worker"] = _replicas(wanted, command, wanted.nodes - 1)
    return [
        {
            "apiVersion": "kubeflow.org/v1",
            "kind": "PyTorchJob",
            "metadata": metadata(wanted),
            "spec": {"runPolicy": {"cleanPodPolicy": "None"}, "pytorchReplicaSpecs": replicas},
        }
    ]


def _replicas(wanted: Wanted, command: list[str], count: int) -> Document:
    # The operator looks for a container of this name, and sets the pods' own policy itself.
    template = pod_template(wanted, command, container="pytorch")
    return {"replicas": count, "restartPolicy": "ExitCode", "template": template}


def _service(wanted: Wanted) -> Document:
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": {INSTANCE: labels(wanted)[INSTANCE]},
        "ports": [{"name": "rendezvous", "port": PORT, "protocol": "TCP"}],
    }
    return {"apiVersion": "v1", "kind": "Service", "metadata": metadata(wanted), "spec": spec}


def _claim(wanted: Wanted) -> list[Document]:
    if wanted.storage is None:
        return []
    by_class = {"storageClassName": wanted.storage_class} if wanted.storage_class else {}
    spec = {
        "accessModes": ["ReadWriteMany" if wanted.nodes > 1 else "ReadWriteOnce"],
        **by_class,
        "resources": {"requests": {"storage": wanted.storage}},
    }
    found = metadata(wanted, wanted.claim_name)
    return [{"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": found, "spec": spec}]


def _config(wanted: Wanted) -> list[Document]:
    if wanted.program.config is None:
        return []
    found = metadata(wanted, config_name(wanted))
    data = {wanted.program.config_file: wanted.program.config}
    return [{"apiVersion": "v1", "kind": "ConfigMap", "metadata": found, "data": data}]
