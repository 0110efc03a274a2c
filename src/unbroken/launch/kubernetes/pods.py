"""The pod that every kind of manifest starts: its command, its volumes, its rights, the time it is given to save."""

import re
from typing import Any, Final

from unbroken.launch.kubernetes.wanted import Wanted

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
