"""Manifests: taken by the API's own schema, deterministic, true to the exit codes, and refused with every problem."""

import copy
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import click
import pytest
import yaml

from tests.unit.launch.kubernetes_schema import Refused, check
from unbroken.cli import run as run_command
from unbroken.cli import train as train_command
from unbroken.errors import ManifestUnfit, PeerLost
from unbroken.launch.kubernetes.documents import NEEDS_ATTENTION, documents
from unbroken.launch.kubernetes.options import (
    KINDS,
    Grace,
    Kind,
    ManifestOptions,
    Program,
    grace_of,
    named_after,
    require_fit,
)
from unbroken.launch.kubernetes.render import manifest
from unbroken.records.journal import Event

TRAIN = Program(
    verb="train", words=("/etc/unbroken/config.yaml", "training.seed=1"), run="runs/a", config="model: {}\n"
)
SCRIPT = Program(verb="run", words=("/app/train.py", "--lr", "1e-3"), run="/runs/a")
GRACE = Grace(140, 0.0, "no save was measured yet")
ONE = ManifestOptions(kind="job", name="a", image="registry.example.org/team/train:1.4", program=SCRIPT, grace=GRACE)


def _every_shape() -> Iterator[ManifestOptions]:
    for kind in KINDS:
        for program in (TRAIN, SCRIPT):
            one = replace(ONE, kind=kind, program=program)
            yield one
            yield replace(one, nodes=3, gpus=8, cpu="32", memory="256Gi", storage="2Ti", storage_class="fast.local")
            yield replace(one, gpus=1, namespace="team-a", secrets=("wandb", "hub"), claim="shared.runs")


EVERY_SHAPE = list(_every_shape())


def pods(document: dict[str, Any]) -> list[dict[str, Any]]:
    """The pod templates of a document, wherever its kind has them."""
    spec = document["spec"]
    if document["kind"] == "Job":
        return [spec["template"]]
    if document["kind"] == "JobSet":
        return [each["template"]["spec"]["template"] for each in spec["replicatedJobs"]]
    return [each["template"] for each in spec["pytorchReplicaSpecs"].values()]


def container(options: ManifestOptions) -> dict[str, Any]:
    found: dict[str, Any] = pods(documents(options)[-1])[0]["spec"]["containers"][0]
    return found


@pytest.mark.promise("G23")
@pytest.mark.parametrize("options", EVERY_SHAPE, ids=lambda w: f"{w.kind}-{w.program.verb}-{w.nodes}x{w.gpus}")
def test_the_api_takes_every_manifest(options: ManifestOptions) -> None:
    require_fit(options)
    for document in documents(options):
        check(document)


def _set(path: str, value: object) -> Callable[[dict[str, Any]], None]:
    def change(job: dict[str, Any]) -> None:
        *parents, last = path.split(".")
        place: Any = job
        for part in parents:
            place = place[int(part) if part.isdecimal() else part]
        place[last] = value

    return change


POLICY = "spec.podFailurePolicy.rules"
WRONG = {
    "unknown key": _set("spec.backofLimit", 3),
    "unknown key of a pod": _set("spec.template.spec.terminationGraceSeconds", 3),
    "unknown key of a container": _set("spec.template.spec.containers.0.images", "x"),
    "text for a number": _set("spec.backoffLimit", "3"),
    "number for a text": _set("spec.template.spec.containers.0.image", 3),
    "no such policy": _set("spec.template.spec.restartPolicy", "Sometimes"),
    "restarted by the kubelet": _set("spec.template.spec.restartPolicy", "OnFailure"),
    "no such action": _set(f"{POLICY}.0.action", "Fail"),
    "codes out of order": _set(f"{POLICY}.0.onExitCodes.values", [3, 2]),
    "success as a failure": _set(f"{POLICY}.1.onExitCodes.values", [0]),
    "no such container": _set(f"{POLICY}.1.onExitCodes.containerName", "trian"),
    "condition without its type": _set(f"{POLICY}.2.onPodConditions", [{"status": "True"}]),
    "no completions": _set("spec.completions", None),
}


@pytest.mark.parametrize("change", WRONG.values(), ids=WRONG.keys())
def test_the_check_itself_refuses_what_the_api_would(change: Callable[[dict[str, Any]], None]) -> None:
    job = copy.deepcopy(documents(ONE)[-1])
    check(job)
    change(job)
    with pytest.raises(Refused):
        check(job)


@pytest.mark.parametrize("kind", KINDS)
def test_the_text_is_the_documents_with_remarks_and_always_the_same(kind: str) -> None:
    options = replace(ONE, kind=kind, program=TRAIN, nodes=2, gpus=8, storage="1Ti")  # type: ignore[arg-type]
    text = manifest(options, "unbroken kubernetes")
    assert list(yaml.safe_load_all(text)) == documents(options)
    assert text == manifest(options, "unbroken kubernetes")
    assert "&id" not in text and "*id" not in text
    assert "kubectl delete -f FILE deletes it too" in text
    assert text.count("  # From SIGTERM to SIGKILL: no save was measured yet") == 1
    assert f"kubectl patch {kind} a --type merge" in text and max(map(len, text.splitlines())) <= 120


# ---- what exit codes do ----


def decided(rules: list[dict[str, Any]], code: int, *, is_disrupted: bool = False) -> str:
    """What a Job does about a pod's end: the first rule that fits, else it is counted."""
    for rule in rules:
        if code in rule.get("onExitCodes", {}).get("values", ()):
            return str(rule["action"])
        if is_disrupted and any(each["type"] == "DisruptionTarget" for each in rule.get("onPodConditions", ())):
            return str(rule["action"])
    return "Count"


@pytest.mark.promise("G23")
@pytest.mark.parametrize("kind", ["job", "jobset"])
def test_a_clean_stop_resumes_a_crash_is_counted_and_what_a_user_decides_ends_it(kind: str) -> None:
    spec = documents(replace(ONE, kind=kind))[-1]["spec"]  # type: ignore[arg-type]
    job = spec if kind == "job" else spec["replicatedJobs"][0]["template"]["spec"]
    rules = job["podFailurePolicy"]["rules"]
    assert "--stopped-exit-code=75" in container(replace(ONE, kind=kind))["command"]  # type: ignore[arg-type]
    assert decided(rules, 75) == "Ignore"
    assert {code: decided(rules, code) for code in (2, 3, 4, 5, 6, 8)} == dict.fromkeys((2, 3, 4, 5, 6, 8), "FailJob")
    # Our bug or a lost rank, a run that is held, storage, a kill: tried again, and counted.
    assert {code: decided(rules, code) for code in (1, 7, 74, 137)} == dict.fromkeys((1, 7, 74, 137), "Count")
    assert decided(rules, 137, is_disrupted=True) == "Ignore"
    # Halted while its machine was drained is halted all the same.
    assert decided(rules, 4, is_disrupted=True) == "FailJob"


def test_a_jobset_starts_all_nodes_again_after_a_crash_and_none_after_a_halt() -> None:
    spec = documents(replace(ONE, kind="jobset", nodes=2, restarts=7))[-1]["spec"]
    assert spec["replicatedJobs"][0]["template"]["spec"]["backoffLimit"] == 0
    assert spec["failurePolicy"]["maxRestarts"] == 7
    (rule,) = spec["failurePolicy"]["rules"]
    assert (rule["action"], rule["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])


def test_a_pytorchjob_gets_a_code_that_its_operator_starts_again() -> None:
    options = replace(ONE, kind="pytorchjob", nodes=3)
    groups = documents(options)[-1]["spec"]["pytorchReplicaSpecs"]
    assert {name: (each["replicas"], each["restartPolicy"]) for name, each in groups.items()} == {
        "Master": (1, "ExitCode"),
        "Worker": (2, "ExitCode"),
    }
    (code,) = [word for word in container(options)["command"] if word.startswith("--stopped-exit-code=")]
    assert int(code.partition("=")[2]) >= 128
    assert "--max-restarts=20" in container(options)["command"]


# ---- the pod ----


@pytest.mark.parametrize("options", EVERY_SHAPE, ids=lambda w: f"{w.kind}-{w.program.verb}-{w.nodes}x{w.gpus}")
def test_the_command_of_a_pod_is_one_that_the_tool_takes(options: ManifestOptions) -> None:
    first, verb, *words = container(options)["command"]
    assert (first, verb) == ("unbroken", options.program.verb)
    results = {"$(NODE_RANK)": "1", "$(RANK)": "1", "$(MASTER_ADDR)": "h", "$(MASTER_PORT)": "29500"}
    for variable, value in results.items():
        words = [word.replace(variable, value) for word in words]
    taker: click.Command = {"train": train_command.command, "run": run_command.command}[verb]
    taken = taker.make_context(verb, list(words)).params
    assert taken["stopped_exit_code"] in (75, 143) and taken["shutdown_timeout"] < options.grace.seconds
    assert [str(taken["nnodes"]), taken["node_rank"]] == ([str(options.nodes), 1] if options.nodes > 1 else ["1", None])


def test_several_nodes_meet_at_the_first_pod_by_a_name_that_the_service_gives() -> None:
    *_, service, job = documents(replace(ONE, nodes=4))
    pod = job["spec"]["template"]
    assert service["spec"]["clusterIP"] == "None" and service["spec"]["publishNotReadyAddresses"] is True
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    assert pod["spec"]["subdomain"] == service["metadata"]["name"]
    assert (job["spec"]["completionMode"], job["spec"]["completions"], job["spec"]["parallelism"]) == ("Indexed", 4, 4)
    assert (
        f"--master-addr={job['metadata']['name']}-0.{service['metadata']['name']}"
        in container(replace(ONE, nodes=4))["command"]
    )
    first = "--master-addr=a-node-0-0.a"
    assert first in container(replace(ONE, kind="jobset", nodes=4))["command"]


@pytest.mark.parametrize("kind", KINDS)
def test_no_pod_is_root_or_has_more_rights_than_it_needs(kind: str) -> None:
    for pod in pods(documents(replace(ONE, kind=kind, nodes=2))[-1]):  # type: ignore[arg-type]
        assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
        assert pod["spec"]["securityContext"]["runAsUser"] == 1000
        assert pod["spec"]["automountServiceAccountToken"] is False
        (only,) = pod["spec"]["containers"]
        assert only["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def test_secrets_are_named_and_never_written() -> None:
    found = container(replace(ONE, secrets=("wandb",)))
    assert found["envFrom"] == [{"secretRef": {"name": "wandb"}}]
    written = {each["name"] for each in found["env"] if "value" in each}
    assert written == {"HOME", "USER"}
    assert not any(document["kind"] == "Secret" for document in documents(ONE))


def test_a_word_of_the_users_is_no_variable_of_the_pods() -> None:
    program = replace(SCRIPT, words=("/app/train.py", "$(HOME)", "a$b"))
    assert container(replace(ONE, program=program))["command"][-3:] == ["/app/train.py", "$$(HOME)", "a$b"]


def _expanded(word: str) -> str:
    """What Kubernetes makes of a word of a command where no variable is set: ``$$`` is ``$``, ``$(NAME)`` stays."""
    found, rest = "", word
    while rest:
        if rest.startswith("$$"):
            found, rest = found + "$", rest[2:]
        elif rest.startswith("$(") and ")" in rest:
            found, rest = found + "EXPANDED", rest[rest.index(")") + 1 :]
        else:
            found, rest = found + rest[0], rest[1:]
    return found


@pytest.mark.promise("U17")
@pytest.mark.parametrize(
    "word", ["$(HOME)", "$$(HOME)", "$$$(HOME)", "a$$b", "$", "$$", "$(", "a$b", "x\n$(HOME)", "plain"]
)
@pytest.mark.parametrize("kind", KINDS)
def test_what_a_user_gives_reaches_the_pod_exactly(kind: Kind, word: str) -> None:
    program = replace(SCRIPT, words=("/app/train.py", word), run=f"/runs/{word}")
    made = manifest(replace(ONE, kind=kind, program=program), f"unbroken kubernetes {word!r}")
    document = list(yaml.safe_load_all(made))[-1]
    command = pods(document)[0]["spec"]["containers"][0]["command"]
    assert _expanded(command[-1]) == word
    assert f"--run-dir=/runs/{word}" in [_expanded(each) for each in command]
    assert made.isascii() and all(line.isprintable() for line in made.split("\n"))


@pytest.mark.promise("U17")
def test_a_path_with_a_control_character_is_refused_by_name() -> None:
    program = replace(SCRIPT, run="/runs/a\nb")
    with pytest.raises(ManifestUnfit) as refused:
        require_fit(replace(ONE, program=program, mount="/runs\x1b"))
    results = [each for each in refused.value.problems if "control character" in each]
    assert [each.split(" ")[0] for each in results] == ["--mount", "the"]


def test_the_claim_that_is_made_can_be_shared_by_several_nodes() -> None:
    for nodes, mode in ((1, "ReadWriteOnce"), (2, "ReadWriteMany")):
        claim = documents(replace(ONE, nodes=nodes, storage="1Ti"))[0]
        assert claim["spec"]["accessModes"] == [mode]
        assert claim["metadata"]["name"] == "a"
    assert not any(each["kind"] == "PersistentVolumeClaim" for each in documents(ONE))


# ---- the time to save ----


def commits(*seconds: float) -> list[Event]:
    return [Event(1, "commit", 0.0, {"seconds": each}) for each in seconds]


def test_the_time_to_save_is_learned_from_the_saves_of_the_run() -> None:
    unmeasured = grace_of([])
    assert (unmeasured.seconds, unmeasured.needed_s) == (140, 0.0)
    measured = grace_of(commits(10.0, 90.0, 30.0))
    # Twice the slowest, a margin for what comes after it, and one for the launcher to speak.
    assert measured.needed_s == 185.0
    assert measured.seconds == 200
    assert measured.because == "the slowest of the last 3 saves took 1 min 30 s"
    assert measured.needed_s <= measured.shutdown_timeout_s < measured.seconds
    assert grace_of(commits(0.1)).seconds == 30


def test_a_time_that_a_user_gives_is_taken_unless_a_save_does_not_fit() -> None:
    assert grace_of(commits(10.0), 600).seconds == 600
    short = replace(ONE, grace=grace_of(commits(90.0), 60))
    with pytest.raises(ManifestUnfit, match=r"--grace-seconds 60 .* 185 s"):
        require_fit(short)


# ---- what is refused ----


def test_every_problem_is_named_at_once() -> None:
    wrong = ManifestOptions(
        kind="job",
        name="A_b",
        image="",
        program=Program(verb="run", words=("train.py",), run=""),
        grace=grace_of(commits(90.0), 5),
        namespace="-x",
        cpu="lots",
        memory="64GB",
        shared_memory="64m",
        claim="a b",
        mount="runs",
        storage_class="fast",
        secrets=("S",),
    )
    with pytest.raises(ManifestUnfit) as refused:
        require_fit(wrong)
    said = refused.value.problems
    assert [each.removeprefix("missing option ").split()[0].rstrip(":") for each in said] == [
        *("--name", "--namespace", "--claim", "--secret", "--image", "--memory", "--shared-memory", "--cpu"),
        *("--storage-class", "--grace-seconds", "--mount", "--run-dir", "the"),
    ]


@pytest.mark.parametrize("run", ["/elsewhere/a", "../a", "runs/../../a", "/runs-other/a"])
def test_a_run_that_would_be_lost_with_its_pod_is_refused(run: str) -> None:
    with pytest.raises(ManifestUnfit, match="/runs"):
        require_fit(replace(ONE, program=replace(SCRIPT, run=run)))


@pytest.mark.parametrize("run", ["a", "runs/a", "./outputs", "/runs/a", "/runs"])
def test_a_run_on_the_volume_is_taken(run: str) -> None:
    require_fit(replace(ONE, program=replace(SCRIPT, run=run)))


QUANTITIES = [("64Gi", True), ("1.5Ti", True), ("500M", True), ("1e9", True), ("123", True), ("64GB", False)]


@pytest.mark.parametrize(
    ("text", "is_good"), [*QUANTITIES, ("0", False), ("64 Gi", False), ("-1Gi", False), ("", False)]
)
def test_quantities_are_those_of_kubernetes(text: str, is_good: bool) -> None:
    options = replace(ONE, memory=text)
    if is_good:
        require_fit(options)
        return
    with pytest.raises(ManifestUnfit, match="--memory"):
        require_fit(options)


@pytest.mark.parametrize("kind", KINDS)
def test_the_longest_name_that_is_taken_gives_pods_that_fit(kind: str) -> None:
    options = replace(ONE, kind=kind, nodes=100)  # type: ignore[arg-type]
    suffix = {"job": "-99", "jobset": "-node-0-99", "pytorchjob": "-worker-99"}[kind]
    longest = replace(options, name="a" * (63 - len(suffix)))
    require_fit(longest)
    with pytest.raises(ManifestUnfit, match="64 characters"):
        require_fit(replace(longest, name=f"{longest.name}a"))


def test_a_name_is_made_of_the_run_directory() -> None:
    assert [named_after(run) for run in ("runs/Big_Model.v2/", "/runs/a", "./outputs")] == [
        "big-model-v2",
        "a",
        "outputs",
    ]
    assert named_after("/") == "run"


def test_the_documents_are_plain_json() -> None:
    assert json.loads(json.dumps(documents(ONE))) == documents(ONE)


@pytest.mark.promise("U5")
def test_a_pod_that_lost_another_rank_is_started_again() -> None:
    assert PeerLost.exit_code not in NEEDS_ATTENTION
