"""The documents of each kind of manifest: a Job, a JobSet, a PyTorchJob, and what each needs beside it.

What an exit code means is decided once: a clean stop and a lost machine are started again and count for nothing, a
crash is started again and counts, and what a person must decide is never started again.
"""

import re
from typing import Any, Final

from unbroken.launch.kubernetes.wanted import SUFFIXES, Wanted

# ---- the pod ----

Document = dict[str, Any]

# Of a clean stop, where a policy on exit codes starts the pod again.
STOPPED: Final = 75
CONFIG_FOLDER: Final = "/etc/unbroken"
PORT: Final = 29500
RANK: Final = "NODE_RANK"
INSTANCE: Final = "app.kubernetes.io/instance"
_SHARED_MEMORY: Final = "/dev/shm"  # noqa: S108 -- a mount in the pod
_HOME: Final = "/tmp"  # noqa: S108 -- a folder in the pod
_INDEX: Final = "metadata.annotations['batch.kubernetes.io/job-completion-index']"


def labels(wanted: Wanted) -> dict[str, str]:
    """What marks every object of a manifest."""
    return {"app.kubernetes.io/name": "unbroken", INSTANCE: wanted.name}


def metadata(wanted: Wanted, name: str | None = None) -> Document:
    """Name, namespace and labels of an object."""
    place = {"namespace": wanted.namespace} if wanted.namespace else {}
    return {"name": name or wanted.name, **place, "labels": labels(wanted)}


def meeting_by_index(wanted: Wanted, first: str) -> list[str]:
    """The words by which the nodes of an indexed job find each other; ``first`` is the host name of node 0."""
    return _meeting(wanted, RANK, first, str(PORT))


def meeting_by_operator(wanted: Wanted) -> list[str]:
    """The same where the training operator tells each pod its place."""
    return _meeting(wanted, "RANK", "$(MASTER_ADDR)", "$(MASTER_PORT)")


def _meeting(wanted: Wanted, rank: str, address: str, port: str) -> list[str]:
    if wanted.nodes == 1:
        return []
    return [f"--nnodes={wanted.nodes}", f"--node-rank=$({rank})", f"--master-addr={address}", f"--master-port={port}"]


def command_line(wanted: Wanted, meeting: list[str], stopped: int = STOPPED, restarts: int = 0) -> list[str]:
    """The command of a pod: the launcher, its options, and the program."""
    program = wanted.program
    processes = wanted.gpus or (1 if wanted.nodes > 1 else 0)
    options = [f"--nproc-per-node={processes}"] if processes else []
    options += meeting
    options += [f"--max-restarts={restarts}"] if restarts else []
    options += [f"--shutdown-timeout={wanted.grace.shutdown_timeout_s}", f"--stopped-exit-code={stopped}"]
    words = [_literal(word) for word in program.words]
    if program.verb == "train":
        return ["unbroken", "train", *words, *options]
    return ["unbroken", "run", *options, f"--run-dir={_literal(program.run)}", "--", *words]


def _literal(word: str) -> str:
    """A word of the user's, which is no variable of the pod's: Kubernetes expands ``$(NAME)`` and halves ``$$``."""
    return re.sub(r"\$(?=[$(])", "$$", word)


def pod_template(wanted: Wanted, command: list[str], *, container: str = "train", is_indexed: bool = False) -> Document:
    """The template of a pod; whoever owns it adds how it is restarted."""
    spec: Document = {
        "terminationGracePeriodSeconds": wanted.grace.seconds,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": wanted.user,
            "runAsGroup": wanted.user,
            "fsGroup": wanted.user,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [_container(wanted, command, container, is_indexed=is_indexed)],
        "volumes": _volumes(wanted),
    }
    return {"metadata": {"labels": labels(wanted)}, "spec": spec}


def _container(wanted: Wanted, command: list[str], name: str, *, is_indexed: bool) -> Document:
    found: Document = {
        "name": name,
        "image": wanted.image,
        "command": command,
        "workingDir": wanted.mount,
        "env": _environment(wanted, is_indexed=is_indexed),
    }
    if wanted.secrets:
        found["envFrom"] = [{"secretRef": {"name": secret}} for secret in wanted.secrets]
    if resources := _resources(wanted):
        found["resources"] = resources
    found["securityContext"] = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    found["volumeMounts"] = [
        {"name": "run", "mountPath": wanted.mount},
        {"name": "shared-memory", "mountPath": _SHARED_MEMORY},
    ]
    if wanted.program.config is not None:
        found["volumeMounts"].append({"name": "config", "mountPath": CONFIG_FOLDER, "readOnly": True})
    return found


def _environment(wanted: Wanted, *, is_indexed: bool) -> list[Document]:
    # A user id that the image has no name for: compilers ask for a name and a home.
    found: list[Document] = [
        {"name": "HOME", "value": _HOME},
        {"name": "USER", "value": "unbroken"},
    ]
    if is_indexed and wanted.nodes > 1:
        found.append({"name": RANK, "valueFrom": {"fieldRef": {"fieldPath": _INDEX}}})
    return found


def _resources(wanted: Wanted) -> Document:
    asked = {"cpu": wanted.cpu, "memory": wanted.memory}
    requests = {name: amount for name, amount in asked.items() if amount is not None}
    limits = {"memory": wanted.memory} if wanted.memory is not None else {}
    if wanted.gpus:
        limits["nvidia.com/gpu"] = str(wanted.gpus)
    return {name: amounts for name, amounts in (("requests", requests), ("limits", limits)) if amounts}


def _volumes(wanted: Wanted) -> list[Document]:
    found: list[Document] = [
        {"name": "run", "persistentVolumeClaim": {"claimName": wanted.claim_name}},
        {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": wanted.shared_memory}},
    ]
    if wanted.program.config is not None:
        found.append({"name": "config", "configMap": {"name": config_name(wanted)}})
    return found


def config_name(wanted: Wanted) -> str:
    """The object that carries the config."""
    return f"{wanted.name}-config"


# ---- the kinds ----

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
