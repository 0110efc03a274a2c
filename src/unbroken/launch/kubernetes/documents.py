"""The documents of a manifest: a Job, JobSet or PyTorchJob with its pod, and the Service, claim and ConfigMap it needs.

Exit codes are mapped to restarts in one place: a clean stop or a lost node restarts without being counted, a crash
restarts and is counted, and an error that needs attention is never restarted.
"""

import re
from typing import Any, Final

from unbroken.launch.kubernetes.options import SUFFIXES, ManifestOptions

# ---- the pod ----

Document = dict[str, Any]

# Exit code of a clean stop, which the podFailurePolicy ignores.
STOPPED: Final = 75
CONFIG_FOLDER: Final = "/etc/unbroken"
PORT: Final = 29500
RANK: Final = "NODE_RANK"
INSTANCE: Final = "app.kubernetes.io/instance"
_SHARED_MEMORY: Final = "/dev/shm"  # noqa: S108 -- a mount in the pod
_HOME: Final = "/tmp"  # noqa: S108 -- a folder in the pod
_INDEX: Final = "metadata.annotations['batch.kubernetes.io/job-completion-index']"


def labels(options: ManifestOptions) -> dict[str, str]:
    """The labels of every object of a manifest."""
    return {"app.kubernetes.io/name": "unbroken", INSTANCE: options.name}


def metadata(options: ManifestOptions, name: str | None = None) -> Document:
    """Name, namespace and labels of an object."""
    namespace = {"namespace": options.namespace} if options.namespace else {}
    return {"name": name or options.name, **namespace, "labels": labels(options)}


def rendezvous_by_index(options: ManifestOptions, first: str) -> list[str]:
    """The node options of an indexed job; ``first`` is the host name of node 0."""
    return _rendezvous(options, RANK, first, str(PORT))


def rendezvous_by_operator(options: ManifestOptions) -> list[str]:
    """The same with the variables that the training operator sets in each pod."""
    return _rendezvous(options, "RANK", "$(MASTER_ADDR)", "$(MASTER_PORT)")


def _rendezvous(options: ManifestOptions, rank: str, address: str, port: str) -> list[str]:
    if options.nodes == 1:
        return []
    return [f"--nnodes={options.nodes}", f"--node-rank=$({rank})", f"--master-addr={address}", f"--master-port={port}"]


def command_line(
    options: ManifestOptions, rendezvous: list[str], stopped: int = STOPPED, restarts: int = 0
) -> list[str]:
    """The command of a pod: the launcher, its options and the program."""
    program = options.program
    processes = options.gpus or (1 if options.nodes > 1 else 0)
    flags = [f"--nproc-per-node={processes}"] if processes else []
    flags += rendezvous
    flags += [f"--max-restarts={restarts}"] if restarts else []
    flags += [f"--shutdown-timeout={options.grace.shutdown_timeout_s}", f"--stopped-exit-code={stopped}"]
    words = [_literal(word) for word in program.words]
    if program.verb == "train":
        return ["unbroken", "train", *words, *flags]
    return ["unbroken", "run", *flags, f"--run-dir={_literal(program.run)}", "--", *words]


def _literal(word: str) -> str:
    """A word of the user, escaped: Kubernetes expands ``$(NAME)`` and turns ``$$`` into ``$``."""
    return re.sub(r"\$(?=[$(])", "$$", word)


def pod_template(
    options: ManifestOptions, command: list[str], *, container: str = "train", is_indexed: bool = False
) -> Document:
    """The pod template; the workload that contains it adds the restart policy."""
    spec: Document = {
        "terminationGracePeriodSeconds": options.grace.seconds,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": options.user,
            "runAsGroup": options.user,
            "fsGroup": options.user,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [_container(options, command, container, is_indexed=is_indexed)],
        "volumes": _volumes(options),
    }
    return {"metadata": {"labels": labels(options)}, "spec": spec}


def _container(options: ManifestOptions, command: list[str], name: str, *, is_indexed: bool) -> Document:
    found: Document = {
        "name": name,
        "image": options.image,
        "command": command,
        "workingDir": options.mount,
        "env": _environment(options, is_indexed=is_indexed),
    }
    if options.secrets:
        found["envFrom"] = [{"secretRef": {"name": secret}} for secret in options.secrets]
    if resources := _resources(options):
        found["resources"] = resources
    found["securityContext"] = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    found["volumeMounts"] = [
        {"name": "run", "mountPath": options.mount},
        {"name": "shared-memory", "mountPath": _SHARED_MEMORY},
    ]
    if options.program.config is not None:
        found["volumeMounts"].append({"name": "config", "mountPath": CONFIG_FOLDER, "readOnly": True})
    return found


def _environment(options: ManifestOptions, *, is_indexed: bool) -> list[Document]:
    # The user id may have no entry in the image, and compilers need a name and a home.
    found: list[Document] = [
        {"name": "HOME", "value": _HOME},
        {"name": "USER", "value": "unbroken"},
    ]
    if is_indexed and options.nodes > 1:
        found.append({"name": RANK, "valueFrom": {"fieldRef": {"fieldPath": _INDEX}}})
    return found


def _resources(options: ManifestOptions) -> Document:
    asked = {"cpu": options.cpu, "memory": options.memory}
    requests = {name: amount for name, amount in asked.items() if amount is not None}
    limits = {"memory": options.memory} if options.memory is not None else {}
    if options.gpus:
        limits["nvidia.com/gpu"] = str(options.gpus)
    return {name: amounts for name, amounts in (("requests", requests), ("limits", limits)) if amounts}


def _volumes(options: ManifestOptions) -> list[Document]:
    found: list[Document] = [
        {"name": "run", "persistentVolumeClaim": {"claimName": options.claim_name}},
        {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": options.shared_memory}},
    ]
    if options.program.config is not None:
        found.append({"name": "config", "configMap": {"name": config_name(options)}})
    return found


def config_name(options: ManifestOptions) -> str:
    """The name of the ConfigMap with the config."""
    return f"{options.name}-config"


# ---- the workloads ----

# Usage, damage, data, no usable checkpoint, not exact, loss NaN: the next pod would fail the same way.
NEEDS_ATTENTION: Final = (2, 3, 4, 5, 6, 8)
# The training operator restarts a pod only if its exit code is 128 or more.
STOPPED_FOR_OPERATOR: Final = 143
_TRAIN: Final = "train"
_GROUP: Final = "node"


def documents(options: ManifestOptions) -> list[Document]:
    """All documents of a manifest, in the order to apply them."""
    made = {"job": _job, "jobset": _job_set, "pytorchjob": _pytorch_job}[options.kind](options)
    return [*_claim(options), *_config(options), *made]


def _job(options: ManifestOptions) -> list[Document]:
    command = command_line(options, rendezvous_by_index(options, f"{options.name}{SUFFIXES['job']}0.{options.name}"))
    spec = _job_spec(options, command, backoff_limit=options.restarts)
    service: list[Document] = []
    if options.nodes > 1:
        spec["template"]["spec"]["subdomain"] = options.name
        service = [_service(options)]
    return [*service, {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata(options), "spec": spec}]


def _job_spec(options: ManifestOptions, command: list[str], *, backoff_limit: int) -> Document:
    template = pod_template(options, command, container=_TRAIN, is_indexed=True)
    # A podFailurePolicy needs pods that the kubelet does not restart itself.
    template["spec"] = {"restartPolicy": "Never", **template["spec"]}
    return {
        "completionMode": "Indexed",
        "completions": options.nodes,
        "parallelism": options.nodes,
        "backoffLimit": backoff_limit,
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {"rules": _rules()},
        "template": template,
    }


def _rules() -> list[Document]:
    # The first matching rule applies: an error that needs attention counts even while the node is drained.
    return [
        {"action": "FailJob", "onExitCodes": _exit_codes(*NEEDS_ATTENTION)},
        {"action": "Ignore", "onExitCodes": _exit_codes(STOPPED)},
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
    ]


def _exit_codes(*codes: int) -> Document:
    return {"containerName": _TRAIN, "operator": "In", "values": sorted(codes)}


def _job_set(options: ManifestOptions) -> list[Document]:
    first = f"{options.name}{SUFFIXES['jobset']}0.{options.name}"
    # No second pod in the same Job: if one rank is lost the others exit too, and all are restarted together.
    spec = _job_spec(options, command_line(options, rendezvous_by_index(options, first)), backoff_limit=0)
    return [
        {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": metadata(options),
            "spec": {
                "network": {"enableDNSHostnames": True, "subdomain": options.name, "publishNotReadyAddresses": True},
                "failurePolicy": {
                    "maxRestarts": options.restarts,
                    "rules": [
                        {
                            "name": "needsAttention",
                            "action": "FailJobSet",
                            "onJobFailureReasons": ["PodFailurePolicy"],
                        }
                    ],
                },
                "replicatedJobs": [{"name": _GROUP, "replicas": 1, "template": {"spec": spec}}],
            },
        }
    ]


def _pytorch_job(options: ManifestOptions) -> list[Document]:
    command = command_line(options, rendezvous_by_operator(options), STOPPED_FOR_OPERATOR, options.restarts)
    replicas = {"Master": _replicas(options, command, 1)}
    if options.nodes > 1:
        replicas["Worker"] = _replicas(options, command, options.nodes - 1)
    return [
        {
            "apiVersion": "kubeflow.org/v1",
            "kind": "PyTorchJob",
            "metadata": metadata(options),
            "spec": {"runPolicy": {"cleanPodPolicy": "None"}, "pytorchReplicaSpecs": replicas},
        }
    ]


def _replicas(options: ManifestOptions, command: list[str], count: int) -> Document:
    # The operator requires this container name, and sets the restart policy of the pods itself.
    template = pod_template(options, command, container="pytorch")
    return {"replicas": count, "restartPolicy": "ExitCode", "template": template}


def _service(options: ManifestOptions) -> Document:
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": {INSTANCE: labels(options)[INSTANCE]},
        "ports": [{"name": "rendezvous", "port": PORT, "protocol": "TCP"}],
    }
    return {"apiVersion": "v1", "kind": "Service", "metadata": metadata(options), "spec": spec}


def _claim(options: ManifestOptions) -> list[Document]:
    if options.storage is None:
        return []
    by_class = {"storageClassName": options.storage_class} if options.storage_class else {}
    spec = {
        "accessModes": ["ReadWriteMany" if options.nodes > 1 else "ReadWriteOnce"],
        **by_class,
        "resources": {"requests": {"storage": options.storage}},
    }
    found = metadata(options, options.claim_name)
    return [{"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": found, "spec": spec}]


def _config(options: ManifestOptions) -> list[Document]:
    if options.program.config is None:
        return []
    found = metadata(options, config_name(options))
    data = {options.program.config_file: options.program.config}
    return [{"apiVersion": "v1", "kind": "ConfigMap", "metadata": found, "data": data}]
