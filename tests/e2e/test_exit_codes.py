"""Every exit code that a training command can end with, each from a real job under ``unbroken run``."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]

SCRIPT = """
import os, signal, sys, time
import torch
from torch import nn
import unbroken

case, directory = sys.argv[1], sys.argv[2]
torch.manual_seed(0)
model = nn.Linear(4, 2)
optimizer = torch.optim.AdamW(model.parameters())
items = dict(model=model, optimizer=optimizer)
settings = dict(save_steps=2, audit="off")
if case == "bug":
    items["model"] = nn.Linear(4, 2)
    items["optimizer"] = torch.optim.AdamW(items["model"].parameters())
if case == "usage":
    items["thing"] = object()
if case == "other-model":
    items["model"] = nn.Linear(4, 3)
    items["optimizer"] = torch.optim.AdamW(items["model"].parameters())
if case == "named":
    settings["resume"] = directory + "@2"
if case == "elsewhere":
    settings["resume"] = sys.argv[3]
with unbroken.Run(directory, settings=unbroken.Settings(**settings), **items) as run:
    for step in run.steps(100_000 if case == "held" else 8):
        loss = items["model"](torch.randn(3, 4)).square().mean()
        items["optimizer"].zero_grad()
        loss.backward()
        items["optimizer"].step()
        run.log(loss=loss if case != "nan" else loss * float("nan"))
        if case == "stop" and step == 3:
            run.stop("enough")
        if case == "halt" and step == 3:
            run.halt("bucket web ran dry")
        if case == "bug" and step == 3:
            raise KeyError("a mistake of the script")
        if case == "killed" and step == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        if case == "full" and step == 6:
            os.environ["FULL"] = "1"
        if case == "held":
            print("running", flush=True)
            time.sleep(0.2)
"""

FULL_DISK = """
import errno, os
import unbroken.disk as disk
create = disk.LocalDisk.create
def refuse(self, path):
    if os.environ.get("FULL") and "checkpoints" in path.parts:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return create(self, path)
disk.LocalDisk.create = refuse
"""


def start(tmp_path: Path, case: str, *options: str, extra: tuple[str, ...] = ()) -> "subprocess.Popen[str]":
    script = tmp_path / "train.py"
    script.write_text((FULL_DISK if case == "full" else "") + SCRIPT)
    command = [
        sys.executable,
        "-m",
        "unbroken",
        "run",
        *options,
        "--",
        str(script),
        case,
        str(tmp_path / "run"),
        *extra,
    ]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, cwd=tmp_path)


def end(tmp_path: Path, case: str, *options: str, extra: tuple[str, ...] = ()) -> tuple[int, str]:
    process = start(tmp_path, case, *options, extra=extra)
    out, err = process.communicate(timeout=PATIENCE_S)
    return process.returncode, out + err


def outcome(tmp_path: Path) -> dict[str, object]:
    command = [sys.executable, "-m", "unbroken", "outcome", str(tmp_path / "run"), "--json"]
    said = subprocess.run(command, capture_output=True, text=True, check=False)
    found: dict[str, object] = json.loads(said.stdout)
    assert said.returncode == found["exit_code"]
    return found


@pytest.mark.promise("G10")
def test_a_run_that_reaches_its_target_ends_with_0_and_is_done(tmp_path: Path) -> None:
    code, said = end(tmp_path, "plain")
    assert code == 0, said
    assert (outcome(tmp_path)["status"], outcome(tmp_path)["class"]) == ("completed", "done")
    command = [sys.executable, "-m", "unbroken", "ls", str(tmp_path / "run"), "--json"]
    kept = [each["kept_because"] for each in json.loads(subprocess.check_output(command, text=True))["entries"]]
    assert any("last 3" in reasons for reasons in kept), "what the job keeps is known to who looks"


@pytest.mark.promise("G10")
def test_a_run_that_is_stopped_refuses_another_model_and_resumes_and_named_damage_ends_with_3(tmp_path: Path) -> None:
    code, said = end(tmp_path, "stop", "--stopped-exit-code", "75")
    assert code == 75, said
    assert (outcome(tmp_path)["status"], outcome(tmp_path)["class"]) == ("stopped", "again")
    code, said = end(tmp_path, "other-model")
    assert code == 6, said
    assert "shape" in said
    code, said = end(tmp_path, "plain")
    assert code == 0, said
    assert outcome(tmp_path)["status"] == "completed"
    [part] = (tmp_path / "run/checkpoints/final/state").glob("*.distcp")
    data = bytearray(part.read_bytes())
    data[len(data) // 2] ^= 1
    part.write_bytes(data)
    code, said = end(tmp_path, "elsewhere", extra=(str(part.parents[1]),))
    assert code == 3, said
    assert part.exists(), "a checkpoint that a person named is not moved"


@pytest.mark.promise("G10")
@pytest.mark.parametrize(
    ("case", "code", "status", "kind"),
    [
        ("bug", 1, "error", "look"),
        ("nan", 8, "error", "look"),
        ("halt", 4, "halted", "look"),
        ("full", 74, "error", "again"),
        ("killed", 128 + signal.SIGKILL, "crashed", "again"),
    ],
)
def test_a_job_that_ends_badly_says_how(tmp_path: Path, case: str, code: int, status: str, kind: str) -> None:
    found, said = end(tmp_path, case)
    assert found == code, said
    results = outcome(tmp_path)
    assert (results["status"], results["class"], results["exit_code"]) == (status, kind, code)


def test_an_object_without_state_is_a_usage_error(tmp_path: Path) -> None:
    code, said = end(tmp_path, "usage")
    assert code == 2, said
    assert "'thing'" in said


def test_a_named_store_without_a_checkpoint_ends_with_5(tmp_path: Path) -> None:
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    code, said = end(tmp_path, "elsewhere", extra=(str(tmp_path / "run"),))
    assert code == 5, said


@pytest.mark.promise("G8")
def test_a_run_that_is_held_ends_with_7_and_the_holder_continues_until_a_signal_saves_and_stops_it(
    tmp_path: Path,
) -> None:
    holder = start(tmp_path, "held")
    assert holder.stdout is not None
    assert holder.stdout.readline() == "running\n"
    code, said = end(tmp_path, "plain")
    assert code == 7, said
    holder.send_signal(signal.SIGTERM)
    out, err = holder.communicate(timeout=PATIENCE_S)
    assert holder.returncode == 0, out + err
    results = outcome(tmp_path)
    assert (results["status"], results["class"], results["job"]) == ("stopped", "again", 1)
    assert list((tmp_path / "run/checkpoints").glob("checkpoint-*-shutdown"))
