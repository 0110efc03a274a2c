"""A real training process on a machine that is to be taken away: it saves, stops, and resumes elsewhere."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.conftest import Tool
from tests.e2e.clouds import loopback_only, serving
from tests.patience import PATIENCE_S
from unbroken import Run, Settings
from unbroken.config.decode import decode
from unbroken.config.overrides import take_apart
from unbroken.errors import BadSpot
from unbroken.gpt.train import _settings as trainer_settings
from unbroken.launch.run_config import RunConfig
from unbroken.records.journal import read_history
from unbroken.records.layout import Layout
from unbroken.records.outcome import read_outcome

# Says where it goes: whoever connects to another machine than this one ends the process.
SCRIPT = """
import os, sys, time

def only_loopback(event, details):
    if event == "socket.connect" and not str(details[1][0]).startswith(("127.", "::1", "/")):
        os.write(2, f"a connection to {details[1]!r}".encode())
        os._exit(99)

sys.addaudithook(only_loopback)
import torch, unbroken

model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
settings = unbroken.Settings(save_steps=None, audit="off")
with unbroken.Run("runs/a", settings=settings, model=model, optimizer=optimizer) as run:
    for step in run.steps(int(sys.argv[1])):
        optimizer.zero_grad()
        model(torch.ones(2)).sum().backward()
        optimizer.step()
        time.sleep(float(sys.argv[2]))
"""


def test_a_job_stops_by_a_notice_and_the_same_command_resumes(tmp_path: Path, unbroken: Tool) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    words = [sys.executable, "-m", "unbroken", "run", "--stopped-exit-code", "75", "--", "train.py"]
    with serving("gcp") as cloud:
        env = {**os.environ, **cloud.environment}
        with subprocess.Popen([*words, "100000", "0.02"], cwd=tmp_path, env=env, stderr=subprocess.PIPE) as job:
            try:
                until_s = time.monotonic() + PATIENCE_S
                while len(cloud.asked) < 3 and job.poll() is None and time.monotonic() < until_s:
                    time.sleep(0.02)
                cloud.announce()
                said = job.communicate(timeout=PATIENCE_S)[1].decode()
            finally:
                job.kill()
    assert job.returncode == 75, said
    outcome = json.loads(unbroken("outcome", "runs/a", "--json").stdout)
    assert (outcome["status"], outcome["class"]) == ("stopped", "again")
    assert outcome["reason"].startswith("spot interruption notice (")
    step = outcome["step"]
    assert (tmp_path / f"runs/a/checkpoints/checkpoint-{step}-shutdown").is_dir()
    again = unbroken("run", "--", "train.py", str(step + 3), "0")
    assert again.returncode == 0, again.stderr
    assert read_history(Layout(tmp_path / "runs/a")).of_kind("resume")[-1].values["step"] == step


@pytest.mark.parametrize("wrong", [{"UNBROKEN_SPOT": "asw"}, {"UNBROKEN_SPOT_ADDRESS": "10.0.0.1:80"}])
def test_a_word_or_an_address_that_is_wrong_ends_the_job_before_it_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: dict[str, str]
) -> None:
    for name, value in ({"UNBROKEN_SPOT": "aws", "UNBROKEN_SPOT_ADDRESS": "127.0.0.1:9"} | wrong).items():
        monkeypatch.setenv(name, value)
    run = tmp_path / "run"
    with pytest.raises(BadSpot), loopback_only(), Run(run, settings=Settings(audit="off"), model=torch.nn.Linear(1, 1)):
        raise AssertionError("it was let in")
    outcome = read_outcome(Layout(run), now_s=time.time())
    assert outcome is not None and (outcome.exit_code, outcome.verdict) == (2, "look")


def test_the_configs_word_reaches_the_run() -> None:
    config = decode(None, take_apart(["data.path=data", "training.spot=azure"]).overrides, source="a test").config
    assert trainer_settings(RunConfig(config), (), force=False, has_scaler=False).spot == "azure"
