"""The API's own schema, offline: models that its authors generate from it, held strictly.

``kubeflow-trainer-api`` carries the models of the core objects, of Job and of JobSet. A model leaves out what it does
not know; so what comes back from it must be what went in. PyTorchJob has no such package without a client for clusters:
its few own fields are checked here by hand, the pods in it by the model.
"""

import importlib
from typing import Any

_KINDS = {
    ("v1", "Service"): "IoK8sApiCoreV1Service",
    ("v1", "ConfigMap"): "IoK8sApiCoreV1ConfigMap",
    ("v1", "PersistentVolumeClaim"): "IoK8sApiCoreV1PersistentVolumeClaim",
    ("batch/v1", "Job"): "IoK8sApiBatchV1Job",
    ("jobset.x-k8s.io/v1alpha2", "JobSet"): "JobsetV1alpha2JobSet",
}
_POD = "IoK8sApiCoreV1PodTemplateSpec"
_ACTIONS = ("FailJob", "FailIndex", "Ignore", "Count")


class Refused(AssertionError):
    """What an API server would not take."""


def check(document: dict[str, Any]) -> None:
    """Pass if an API server takes a document."""
    place = (document.get("apiVersion"), document.get("kind"))
    if place == ("kubeflow.org/v1", "PyTorchJob"):
        _check_pytorch_job(document)
        return
    if place not in _KINDS:
        raise Refused(f"no such kind: {place}")
    _check_by_model(_KINDS[place], document)
    if document["kind"] == "Job":
        _check_job(document["metadata"]["name"], document["spec"])
    if document["kind"] == "JobSet":
        for group in document["spec"]["replicatedJobs"]:
            _check_job(f"{document['metadata']['name']}-{group['name']}-0", group["template"]["spec"])


def _check_by_model(name: str, value: dict[str, Any]) -> None:
    model = getattr(importlib.import_module("kubeflow_trainer_api.models"), name)
    try:
        back = model.from_dict(value).to_dict()
    except (ValueError, TypeError, KeyError) as wrong:
        raise Refused(str(wrong)) from wrong
    if back != value:
        raise Refused(f"{name} does not know all of it, or takes it for something else:\n{value}\n{back}")


def _check_job(name: str, spec: dict[str, Any]) -> None:
    """What the server checks beyond the schema."""
    if spec["template"]["spec"]["restartPolicy"] not in ("Never", "OnFailure"):
        raise Refused("a Job's pods are restarted Never or OnFailure")
    if spec.get("completionMode") == "Indexed" and not spec.get("completions"):
        raise Refused("an indexed Job says how many completions it has")
    if len(f"{name}-{spec['completions'] - 1}") > 63:
        raise Refused("the host name of its last pod does not fit")
    containers = [each["name"] for each in spec["template"]["spec"]["containers"]]
    mounts = {each["name"] for each in spec["template"]["spec"]["volumes"]}
    if not {m["name"] for c in spec["template"]["spec"]["containers"] for m in c["volumeMounts"]} <= mounts:
        raise Refused("a mount has no volume")
    if spec.get("podFailurePolicy") and spec["template"]["spec"]["restartPolicy"] != "Never":
        raise Refused("a policy on failures needs pods that are never restarted")
    if spec.get("podFailurePolicy") and spec.get("podReplacementPolicy", "Failed") != "Failed":
        raise Refused("a policy on failures replaces pods that have failed")
    for rule in spec.get("podFailurePolicy", {}).get("rules", []):
        _check_rule(rule, containers)


def _check_rule(rule: dict[str, Any], containers: list[str]) -> None:
    if rule["action"] not in _ACTIONS or ("onExitCodes" in rule) == ("onPodConditions" in rule):
        raise Refused(f"no such rule: {rule}")
    if "onExitCodes" in rule:
        codes = rule["onExitCodes"]
        values = codes["values"]
        if values != sorted(set(values)) or not 1 <= len(values) <= 255 or codes["operator"] not in ("In", "NotIn"):
            raise Refused(f"exit codes are in order and each once: {codes}")
        if (codes["operator"] == "In" and 0 in values) or codes.get("containerName") not in (None, *containers):
            raise Refused(f"0 is no failure, and the container must be there: {codes}")


def _check_pytorch_job(document: dict[str, Any]) -> None:
    _only(document, "apiVersion", "kind", "metadata", "spec")
    _only(document["metadata"], "name", "namespace", "labels", "annotations")
    _only(document["spec"], "runPolicy", "pytorchReplicaSpecs", "nprocPerNode", "elasticPolicy")
    policy = document["spec"].get("runPolicy", {})
    _only(policy, "cleanPodPolicy", "backoffLimit", "suspend", "activeDeadlineSeconds", "ttlSecondsAfterFinished")
    if policy.get("cleanPodPolicy") not in (None, "None", "Running", "All"):
        raise Refused(f"no such cleanPodPolicy: {policy}")
    replicas = document["spec"]["pytorchReplicaSpecs"]
    _only(replicas, "Master", "Worker")
    if replicas["Master"]["replicas"] != 1:
        raise Refused("there is one master")
    for group in replicas.values():
        _only(group, "replicas", "restartPolicy", "template")
        if group["restartPolicy"] not in ("Always", "OnFailure", "Never", "ExitCode") or group["replicas"] < 1:
            raise Refused(f"no such replicas: {group}")
        if "pytorch" not in [each["name"] for each in group["template"]["spec"]["containers"]]:
            raise Refused("no container is called pytorch")
        _check_by_model(_POD, group["template"])


def _only(value: dict[str, Any], *keys: str) -> None:
    if unknown := value.keys() - set(keys):
        raise Refused(f"unknown: {sorted(unknown)}")
