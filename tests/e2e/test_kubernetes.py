"""``unbroken kubernetes`` as a command, and the command of its pods started for real, as a cluster would."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import Tool
from tests.unit.launch.test_kubernetes import decided

IMAGE = "registry.example.org/team/train:1.4"
SCRIPT = """
import os, pathlib, sys, time
import torch, unbroken

model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
settings = unbroken.Settings(save_steps=None, audit="off")
with unbroken.Run("runs/a", settings=settings, model=model, optimizer=optimizer) as run:
    total = run.step + 3 if run.resumed_from else 100000
    for step in run.steps(total):
        optimizer.zero_grad()
        model(torch.ones(2)).sum().backward()
        optimizer.step()
        os.write(1, b"ready\\n")
        time.sleep(0.02)
        if pathlib.Path("halt").exists():
            run.halt("a person is to look")
"""


class Pod:
    """The container of a pod as a process: its command, its variables, its working directory."""

    def __init__(self, template: dict[str, Any]) -> None:
        (container,) = template["spec"]["containers"]
        assert container["command"][0] == "unbroken"
        variables = {each["name"]: each["value"] for each in container["env"]}
        self.process = subprocess.Popen(
            [sys.executable, "-m", *container["command"]],
            cwd=container["workingDir"],
            env={**os.environ, **variables},
            stdout=subprocess.PIPE,
        )

    def wait_until_it_trains(self) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"ready\n"

    def end(self) -> int:
        with self.process:
            self.process.communicate(timeout=240)
        return self.process.returncode


@pytest.mark.promise("G23")
def test_the_pods_of_a_job_stop_go_on_halt_and_complete_as_its_policy_says(unbroken: Tool, tmp_path: Path) -> None:
    volume, script = tmp_path / "volume", tmp_path / "train.py"
    volume.mkdir()
    script.write_text(SCRIPT)
    made = unbroken("kubernetes", "--image", IMAGE, "--mount", volume, "--run-dir", "runs/a", "--json", "--", script)
    assert made.returncode == 0, made.stderr
    spec = json.loads(made.stdout)["documents"][-1]["spec"]
    rules = spec["podFailurePolicy"]["rules"]
    # A node is drained: the pod is asked to end, saves, and another one goes on.
    pod = Pod(spec["template"])
    pod.wait_until_it_trains()
    pod.process.send_signal(signal.SIGTERM)
    assert decided(rules, pod.end()) == "Ignore"
    # What a person is to decide is not started again.
    (volume / "halt").touch()
    assert decided(rules, Pod(spec["template"]).end()) == "FailJob"
    (volume / "halt").unlink()
    assert Pod(spec["template"]).end() == 0
    outcome = json.loads(unbroken("outcome", volume / "runs/a", "--json").stdout)
    assert (outcome["class"], outcome["job"]) == ("done", 3)


def test_a_config_travels_in_the_manifest_and_a_file_that_is_there_is_replaced_only_by_force(
    unbroken: Tool, tmp_path: Path
) -> None:
    assert unbroken("init", "-o", "run.yaml").returncode == 0
    words = ("kubernetes", "run.yaml", "training.output_dir=runs/b", "--image", IMAGE, "--gpus", "8", "--nodes", "2")
    printed = unbroken(*words)
    assert printed.returncode == 0, printed.stderr
    found = {each["kind"]: each for each in yaml.safe_load_all(printed.stdout)}
    assert found["Job"]["metadata"]["name"] == "b"
    assert found["ConfigMap"]["data"]["config.yaml"] == (tmp_path / "run.yaml").read_text()
    command = found["Job"]["spec"]["template"]["spec"]["containers"][0]["command"]
    assert command[:4] == ["unbroken", "train", "/etc/unbroken/config.yaml", "training.output_dir=runs/b"]
    assert printed.stdout.startswith("# Made by: unbroken kubernetes run.yaml training.output_dir=runs/b --image ")
    written = unbroken(*words, "-o", "job.yaml")
    assert written.returncode == 0 and "next: kubectl apply -f job.yaml" in written.stdout
    before = (tmp_path / "job.yaml").read_text()
    assert list(yaml.safe_load_all(before)) == list(yaml.safe_load_all(printed.stdout))
    again = unbroken(*words, "-o", "job.yaml")
    assert again.returncode == 2 and "would-overwrite" in again.stderr and "--force replaces it" in again.stderr
    assert (tmp_path / "job.yaml").read_text() == before
    assert unbroken(*words, "-o", "job.yaml", "--force", "--name", "c").returncode == 0
    replaced = {each["kind"]: each for each in yaml.safe_load_all((tmp_path / "job.yaml").read_text())}
    assert replaced["Job"]["metadata"]["name"] == "c"
    (tmp_path / "folder").mkdir()
    assert "'folder' is a directory" in unbroken(*words, "-o", "folder", "--force").stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "job.yaml", "run.yaml"]


def test_the_time_to_save_is_that_of_the_run_where_its_records_can_be_read(unbroken: Tool, tmp_path: Path) -> None:
    journal = tmp_path / "runs/a/journal"
    journal.mkdir(parents=True)
    (journal / "job-0001.jsonl").write_text(json.dumps({"kind": "commit", "at": time.time(), "seconds": 90.0}) + "\n")
    words = ("kubernetes", "--image", IMAGE, "--run-dir", "runs/a", "--json", "--", "/app/train.py")
    made = json.loads(unbroken(*words).stdout)
    assert made["grace_s"] == 200
    pod = made["documents"][-1]["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] == 200
    assert "# From SIGTERM to SIGKILL: the slowest of the last 1 save took 1 min 30 s." in made["text"]


WRONG = {
    "nothing to run": ((), "the argument CONFIG or -- SCRIPT is missing"),
    "a config and a run": (("run.yaml", "--run-dir", "x"), "a config has training.output_dir"),
    "two configs": (("run.yaml", "other.yaml"), "a run has one config; 'other.yaml'"),
    "no such kind": (("--kind", "cronjob", "run.yaml"), "'cronjob' is not one of"),
    "no nodes": (("--nodes", "0", "run.yaml"), "--nodes"),
    "an override that is none": (("run.yaml", "training.sede=1"), "training.sede"),
    "no image, on no volume": (("run.yaml", "training.output_dir=/x"), "2 things stand in the way"),
}


@pytest.mark.parametrize(("words", "complaint"), WRONG.values(), ids=WRONG.keys())
def test_what_is_wrong_is_said_and_nothing_is_printed(
    unbroken: Tool, tmp_path: Path, words: tuple[str, ...], complaint: str
) -> None:
    (tmp_path / "run.yaml").write_text("data:\n  path: data\n")
    refused = unbroken("kubernetes", *words)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert complaint in refused.stderr and "Traceback" not in refused.stderr
