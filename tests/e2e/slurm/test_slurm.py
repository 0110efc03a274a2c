"""Jobs on a real SLURM: warned, queued again, preempted, cancelled, robbed of a node; in the end the same bits.

One module, so that SLURM comes up once: two emulated nodes on this machine, on a clock that runs tenfold.
"""

import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.slurm.cluster import Cluster, cluster, wait_for
from tests.e2e.slurm.training import (
    DDP_TRAIN,
    LIGHTNING_TRAIN,
    STEPS,
    TRAIN,
    bits,
    fit_alone,
    step_of,
    train_alone,
    train_two_ranks_alone,
)
from tests.exact.gpt_world import tokenize_text, write_text
from tests.trackers.readers import tensorboard_points
from tests.unit.data.texts import tree
from unbroken.data.ingest.request import TokenizeRequest
from unbroken.data.ingest.tokenize import tokenize
from unbroken.records.journal import read_history
from unbroken.records.layout import Layout

pytestmark = [pytest.mark.needs("root", "slurm", "faketime"), pytest.mark.timeout(900)]

TRACKED = ("train.py", "runs/a", "7", "tensorboard")
TINY = (
    *(
        "model.n_layer=1",
        "model.n_embd=32",
        "model.n_head=2",
        "training.max_steps=150",
        "training.global_batch_size=16",
        "optimizer.warmup_steps=2",
    ),
    *("training.save_steps=5", "training.logging_steps=1", "training.eval_steps=1000", "data.epochs=null"),
)


@pytest.fixture(scope="module")
def slurm() -> Iterator[Cluster]:
    # Sockets have short names only, and pytest's directories have long ones.
    directory = Path(tempfile.mkdtemp(prefix="slurm-"))
    directory.chmod(0o755)
    try:
        with cluster(directory) as up:
            yield up
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return bits(train_alone(tmp_path_factory.mktemp("alone") / "it", 7))


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_two_ranks_alone(tmp_path_factory.mktemp("alone"))


@dataclass
class Place:
    """A fresh folder in which a person works with the tool."""

    slurm: Cluster
    path: Path

    @property
    def run(self) -> Path:
        return self.path / "runs" / "a"

    def init(self, *options: str, script: tuple[str, ...] = ("train.py", "runs/a", "7")) -> None:
        words = ("--run-dir", "runs/a", *options, "--", *script)
        self.slurm.tool(self.path, "slurm", "init", "-o", "a.sbatch", *words)

    def submit(self, *options: str) -> str:
        log_text = json.loads(self.slurm.tool(self.path, "slurm", "submit", "a.sbatch", *options, "--json"))
        return str(log_text["job"])

    def go(self) -> None:
        (self.path / "go").touch()

    def log_text(self) -> str:
        """What the jobs have said, for an assertion that fails."""
        return "".join(path.read_text() for path in sorted(self.path.glob("slurm-*.out")))

    def wait_for_step(self, step: int) -> None:
        wait_for(f"step {step}", lambda: step_of(self.run) >= step, self.log_text)

    def wait_for_requeue(self, job: str) -> None:
        wait_for("a requeue", lambda: self.slurm.facts(job)["Restarts"] != "0", self.log_text)

    def facts(self, kind: str) -> list[dict[str, Any]]:
        return [dict(fact.values) for fact in read_history(Layout(self.run)).of_kind(kind)]

    def rewinds(self) -> int:
        return len(list((self.run / "checkpoints" / ".rewinds").glob("*.json")))


@pytest.fixture
def place(slurm: Cluster, tmp_path: Path) -> Place:
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "ddp.py").write_text(DDP_TRAIN)
    return Place(slurm, tmp_path)


@pytest.mark.promise("G23", "K6")
def test_a_job_that_is_warned_saves_is_queued_again_and_ends_with_the_bits_of_one_job(
    place: Place, undisturbed: dict[str, Any]
) -> None:
    # Twelve minutes of a tenfold clock are 72 s; the warning comes when four of them are left. Three jobs that do not
    # come as far as their run in the 48 s before are left to a person, so a busy machine needs the room.
    place.init("--time", "12", "--walltime-reserve", "240")
    job = place.submit()
    place.wait_for_requeue(job)
    place.go()
    assert place.slurm.wait_for_end(job, place.log_text) == "COMPLETED", place.log_text()
    assert bits(place.run) == undisturbed
    stops = place.facts("stop")
    assert stops and all(stop["by"] == "flag" and f"SLURM job {job}" in stop["reason"] for stop in stops), (
        place.log_text()
    )
    # No end time in the environment of this SLURM, so squeue was asked, beside the training.
    deadlines = [fact["at_s"] for fact in place.facts("deadline")]
    assert len(deadlines) >= 2 and all(at_s is not None for at_s in deadlines)
    status = json.loads(place.slurm.tool(place.path, "status", "runs/a", "--json"))
    assert [(each["id"], each["requeues"]) for each in status["placements"]] == [
        (job, number) for number in range(len(status["placements"]))
    ]
    assert place.log_text().count("requeued: stopped") == len(stops)


def test_a_job_that_an_administrator_requeues_resumes_with_the_same_bits(
    place: Place, undisturbed: dict[str, Any]
) -> None:
    place.init("--time", "60")
    job = place.submit()
    place.wait_for_step(5)
    place.slurm.said("scontrol", "requeue", job)
    place.wait_for_requeue(job)
    place.go()
    assert place.slurm.wait_for_end(job, place.log_text) == "COMPLETED", place.log_text()
    assert bits(place.run) == undisturbed
    assert len(place.facts("job-start")) == 2


@pytest.mark.promise("K6")
def test_a_preempted_job_saves_makes_room_and_resumes_with_the_same_bits(
    place: Place, undisturbed: dict[str, Any]
) -> None:
    place.init("--time", "60", "--sbatch", "exclusive=user", "--sbatch", "nodelist=n1", script=TRACKED)
    job = place.submit()
    place.wait_for_step(5)
    urgent = place.slurm.said(
        *("sbatch", "--parsable", "-p", "high", "-w", "n1", "--exclusive", "-o", "/dev/null", "--wrap", "true")
    )
    assert place.slurm.wait_for_end(urgent, place.log_text) == "COMPLETED"
    place.go()
    assert place.slurm.wait_for_end(job, place.log_text) == "COMPLETED", place.log_text()
    assert bits(place.run) == undisturbed
    first, *_ = place.facts("stop")
    assert "SIGUSR1" in first["reason"], "the warning of the preemption, not a kill, ended the first job"
    # All jobs are one run in the tracker, and each step is there once.
    shown_as = [fact["id"] for fact in place.facts("tracker")]
    assert len(shown_as) >= 2 and len(set(shown_as)) == 1
    (shown,) = tensorboard_points(place.run).values()
    assert [step for step, _ in shown] == [*range(1, STEPS + 1)]


@pytest.mark.promise("C11")
def test_a_training_of_lightning_that_is_warned_is_queued_again_once_and_ends_in_the_same_bits(
    place: Place, tmp_path_factory: pytest.TempPathFactory
) -> None:
    pytest.importorskip("lightning")
    alone = fit_alone(tmp_path_factory.mktemp("alone"))
    (place.path / "fit.py").write_text(LIGHTNING_TRAIN)
    place.init("--time", "60", script=("fit.py", "runs/a"))
    job = place.submit()
    place.wait_for_step(5)
    place.slurm.said("scancel", "--signal=USR1", "--batch", job)
    place.wait_for_requeue(job)
    place.go()
    assert place.slurm.wait_for_end(job, place.log_text) == "COMPLETED", place.log_text()
    # Not a second time by Lightning, which saves nothing of its own either.
    assert place.slurm.facts(job)["Restarts"] == "1" and not list(place.path.rglob("hpc_ckpt*"))
    assert len(place.facts("stop")) == 1 and len(place.facts("job-start")) == 2
    assert (place.path / "weights").read_text() == alone


@pytest.mark.promise("G10")
def test_a_cancelled_job_saves_and_is_not_requeued_until_it_is_submitted(
    place: Place, undisturbed: dict[str, Any]
) -> None:
    place.init("--time", "60")
    job = place.submit()
    place.wait_for_step(5)
    place.slurm.said("scancel", job)
    assert place.slurm.wait_for_end(job, place.log_text) == "CANCELLED"
    assert place.slurm.facts(job)["Restarts"] == "0"
    assert place.slurm.said("squeue", "-h", "-n", "a", "-o", "%i") == ""
    assert len(place.facts("stop")) == 1, "it was asked to stop by SIGTERM, and did"
    place.go()
    again = place.submit()
    assert place.slurm.wait_for_end(again, place.log_text) == "COMPLETED", place.log_text()
    assert bits(place.run) == undisturbed


@pytest.mark.promise("G10", "G23")
def test_a_halted_run_is_not_queued_again(place: Place) -> None:
    place.init("--time", "60")
    (place.path / "halt").touch()
    job = place.submit()
    assert place.slurm.wait_for_end(job, place.log_text) == "FAILED"
    assert place.slurm.facts(job)["Restarts"] == "0"
    assert [(end["status"], end["class"]) for end in place.facts("job-end")] == [("halted", "look")]


def test_a_run_that_a_user_stops_is_not_queued_again(place: Place) -> None:
    place.init("--time", "60")
    job = place.submit()
    place.wait_for_step(5)
    place.slurm.tool(place.path, "stop", "runs/a")
    assert place.slurm.wait_for_end(job, place.log_text) == "COMPLETED", place.log_text()
    assert place.slurm.facts(job)["Restarts"] == "0"
    assert [stop["by"] for stop in place.facts("stop")] == ["flag"]


@pytest.mark.promise("G23")
def test_a_chain_of_links_completes_the_run_and_the_rest_of_it_does_nothing(
    place: Place, undisturbed: dict[str, Any]
) -> None:
    place.init("--time", "60")
    said = place.slurm.tool(place.path, "slurm", "chain", "a.sbatch", "--links", "3", "--json")
    first, second, third = (link["job"] for link in json.loads(said)["jobs"])
    place.wait_for_step(5)
    place.slurm.said("scancel", "--signal=USR1", "--batch", first)
    assert place.slurm.wait_for_end(first, place.log_text) == "COMPLETED"
    place.go()
    assert place.slurm.wait_for_end(third, place.log_text) == "COMPLETED", place.log_text()
    assert bits(place.run) == undisturbed
    assert [start["placement"]["id"] for start in place.facts("job-start")] == [first, second]


def test_where_no_job_may_be_queued_again_a_follower_is_submitted(place: Place, undisturbed: dict[str, Any]) -> None:
    place.init("--time", "60", "--no-requeue")
    job = place.submit()
    place.wait_for_step(5)
    place.slurm.said("scancel", "--signal=USR1", "--batch", job)
    assert place.slurm.wait_for_end(job, place.log_text) == "COMPLETED", place.log_text()
    place.go()
    wait_for("the follower", lambda: len(place.facts("job-start")) == 2, place.log_text)
    follower = place.facts("job-start")[-1]["placement"]["id"]
    assert follower != job
    assert place.slurm.wait_for_end(follower, place.log_text) == "COMPLETED", place.log_text()
    assert bits(place.run) == undisturbed


def test_each_task_of_an_array_is_a_run_that_continues_by_itself(
    place: Place, undisturbed: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    words = ("--run-dir", "runs/s%a", "--array", "7-8", "--time", "60", "--", "train.py", "runs/s%a", "%a")
    place.slurm.tool(place.path, "slurm", "init", "-o", "a.sbatch", *words)
    job = place.submit()
    runs = [place.path / "runs" / "s7", place.path / "runs" / "s8"]
    wait_for("both", lambda: all(step_of(run) >= 5 for run in runs), place.log_text)
    place.slurm.said("scancel", "--signal=USR1", "--batch", f"{job}_7")
    wait_for("a requeue", lambda: place.slurm.facts(f"{job}_7")["Restarts"] == "1", place.log_text)
    place.go()
    for task in ("7", "8"):
        assert place.slurm.wait_for_end(f"{job}_{task}", place.log_text) == "COMPLETED", place.log_text()
    assert place.slurm.facts(f"{job}_8")["Restarts"] == "0", "the other task was left alone"
    assert bits(runs[0]) == undisturbed
    assert bits(runs[1]) == bits(train_alone(tmp_path_factory.mktemp("alone") / "other", 8))


@pytest.mark.promise("G12")
def test_the_tasks_of_an_array_tokenize_together_though_one_is_killed(place: Place) -> None:
    for number in range(12):
        folder = place.path / "text" / f"{number}"
        folder.mkdir(parents=True)
        (folder / "a.jsonl").write_text(json.dumps({"text": f"document {number} " * 40}) + "\n")
        (folder / "a.jsonl").write_text((folder / "a.jsonl").read_text() * 3000)
    page = (Path(__file__).parents[3] / "docs" / "tokenize.md").read_text()
    script = "#!/bin/bash\n" + page.split("```sh\n#!/bin/bash\n")[1].split("```")[0]
    for words, ours in (
        ("unbroken tokenize", f"{sys.executable} -m unbroken tokenize --num-workers 1"),
        ("tokenizer.json", "bytes"),
        ("--array=0-15", "--array=0-2"),
        ("--cpus-per-task=32", "--cpus-per-task=1"),
        ("tokenize-%A_%a.out", "slurm-%A_%a.out"),
    ):
        assert words in script
        script = script.replace(words, ours)
    (place.path / "a.sbatch").write_text(script)
    job = place.slurm.said("sbatch", "--parsable", "a.sbatch", cwd=place.path)
    output = place.path / "data" / "train"
    wait_for("a unit", lambda: any(output.glob(".tokenize/units-*/*.json")), place.log_text)
    place.slurm.said("scancel", "--signal=KILL", "--full", f"{job}_0")
    ends = [place.slurm.wait_for_end(f"{job}_{task}", place.log_text) for task in range(3)]
    assert ends[0] != "COMPLETED" and ends[1:] == ["COMPLETED", "COMPLETED"], place.log_text()
    tokenize(TokenizeRequest(place.path / "text", place.path / "expected", "bytes"))
    assert tree(output) == tree(place.path / "expected"), place.log_text()


@pytest.mark.promise("G23")
def test_two_nodes_train_and_when_one_fails_the_other_continues_alone_with_the_same_bits(place: Place) -> None:
    tokenize_text(write_text(place.path / "text"), place.path / "data")
    place.slurm.tool(place.path, "init", "--preset", "tiny", "-o", "run.yaml")
    place.slurm.tool(place.path, "train", "run.yaml", *TINY, "training.output_dir=alone")
    words = ("run.yaml", *TINY, "training.output_dir=runs/a", "--nodes", "2", "--nproc-per-node", "1", "--time", "60")
    place.slurm.tool(place.path, "slurm", "init", "-o", "a.sbatch", *words, "--master-addr", "127.0.0.1")
    job = place.submit()
    place.wait_for_step(6)
    place.slurm.fail_node("n2")
    try:
        place.wait_for_requeue(job)
        # It waits for two nodes, and there is one; a person says that one is enough.
        fewer = ("scontrol", "update", f"JobId={job}", "NumTasks=1", "NumNodes=1-1", "NumCPUs=1")
        wait_for("SLURM to take it", lambda: place.slurm.call(*fewer).returncode == 0, place.log_text)
        assert place.slurm.wait_for_end(job, place.log_text) == "COMPLETED", place.log_text()
    finally:
        place.slurm.repair_node("n2")
    assert bits(place.run) == bits(place.path / "alone")
    worlds = [(start["world_size"], start["placement"]["nodes"]) for start in place.facts("job-start")]
    assert worlds[0] == (2, "n[1-2]") and worlds[-1] == (1, "n1"), worlds


ONE_NODE = ("--time", "60", "--nproc-per-node", "2")
TWO_NODES = ("--time", "60", "--nproc-per-node", "1", "--nodes", "2", "--master-addr", "127.0.0.1")


@pytest.mark.promise("U5")
@pytest.mark.parametrize("victim", [1, 0])
def test_a_job_whose_rank_is_killed_inside_backward_is_queued_again_and_ends_with_the_same_bits(
    place: Place, two_ranks: Path, victim: int
) -> None:
    place.init(*TWO_NODES, script=("ddp.py", "kill", str(victim), "auto"))
    job = place.submit()
    assert place.slurm.wait_for_end(job, place.log_text) == "COMPLETED", place.log_text()
    assert place.slurm.facts(job)["Restarts"] == "1"
    if victim == 1:
        require_lost_rank(place)
    # A first rank that is killed tells nothing: its job is a crash, and the launcher names the signal.
    assert "SIGKILL" in place.log_text()
    assert place.log_text().count("unbroken slurm job: requeued: ") == 1
    assert bits(place.run) == bits(two_ranks)


def require_lost_rank(place: Place) -> None:
    """The first job of SLURM has ended because rank 1 was lost, and that is why it was queued again."""
    *_, lost, done = place.facts("job-end")
    assert (lost["status"], lost["class"], done["class"]) == ("error", "again", "done"), place.log_text()
    assert lost["reason"].startswith("peer-lost: rank 1 is gone"), lost["reason"]


@pytest.mark.promise("U5")
def test_a_job_of_which_one_rank_raises_inside_backward_is_not_queued_again(place: Place) -> None:
    place.init(*TWO_NODES, script=("ddp.py", "raise", "1", "auto"))
    job = place.submit()
    assert place.slurm.wait_for_end(job, place.log_text) == "FAILED", place.log_text()
    assert place.slurm.facts(job)["Restarts"] == "0"
    [end] = place.facts("job-end")
    assert (end["status"], end["class"]) == ("error", "look"), place.log_text()
    [line] = [each for each in place.log_text().splitlines() if "not requeued" in each]
    for said in (end["reason"], line):
        assert "rank 1 failed first: ValueError: the label is 1001 of 1000" in said


@pytest.mark.promise("U5", "U9")
def test_a_rewind_in_the_settings_happens_once_over_a_lost_rank_and_a_second_submit(
    place: Place, two_ranks: Path
) -> None:
    shutil.copytree(two_ranks, place.run, symlinks=True)
    place.init(*ONE_NODE, script=("ddp.py", "kill", "1", "4"))
    job = place.submit()
    assert place.slurm.wait_for_end(job, place.log_text) == "COMPLETED", place.log_text()
    assert place.slurm.facts(job)["Restarts"] == "1"
    require_lost_rank(place)
    assert place.slurm.wait_for_end(place.submit(), place.log_text) == "COMPLETED", place.log_text()
    _, rewound, requeued, again = place.facts("resume")
    assert (rewound["step"], rewound["requested"]) == (4, "4")
    # The save of step 8 may or may not have been committed when the rank was killed; that of step 6 was.
    assert requeued["step"] in (6, 8) and again["step"] == 12
    assert place.rewinds() == 1 and bits(place.run) == bits(two_ranks)


@pytest.mark.promise("U9")
@pytest.mark.parametrize("way", ["config", "flag"])
def test_a_rewind_of_the_trainer_happens_once_over_a_requeue(place: Place, way: str) -> None:
    tokenize_text(write_text(place.path / "text"), place.path / "data")
    place.slurm.tool(place.path, "init", "--preset", "tiny", "-o", "run.yaml")
    words = ("run.yaml", *TINY, "training.max_steps=3", "training.save_steps=1", "training.output_dir=runs/a")
    place.slurm.tool(place.path, "train", *words)
    alone = bits(place.run)
    if way == "config":
        config = place.path / "run.yaml"
        config.write_text(config.read_text().replace("  resume: auto ", '  resume: "1" '))
    asked = ("--resume", "1") if way == "flag" else ()
    # All of its time is kept for a last save: each job stops after one step, and is queued again.
    hurried = ("training.max_runtime_seconds=1000", "training.walltime_reserve_seconds=999.99")
    place.slurm.tool(place.path, "slurm", "init", "-o", "a.sbatch", *words, *hurried, *asked, "--time", "60")
    job = place.submit()
    assert place.slurm.wait_for_end(job, place.log_text) == "COMPLETED", place.log_text()
    assert place.slurm.facts(job)["Restarts"] == "1"
    assert [each["step"] for each in place.facts("resume")] == [0, 1, 2]
    assert place.rewinds() == 1 and bits(place.run) == alone


def test_a_partition_that_is_not_there_is_reported_in_sbatchs_own_words(place: Place) -> None:
    place.init("--time", "60", "--partition", "nowhere")
    ended = place.slurm.call(sys.executable, "-m", "unbroken", "slurm", "submit", "a.sbatch", cwd=place.path)
    assert ended.returncode == 2
    assert "error[slurm-refused]" in ended.stderr and "invalid partition specified: nowhere" in ended.stderr
