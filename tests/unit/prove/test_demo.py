"""The demo's folder, its plan and its verdict, without the jobs: whose folder it takes, and what it calls equal."""

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import unbroken
from unbroken.config import load
from unbroken.errors import BadUsage, RunHeld, StorageFailed
from unbroken.files import LOCAL, Files
from unbroken.prove import demo_report, demo_setup
from unbroken.prove.demo_setup import ALONE, CHAIN, NEEDED_BYTES, STEPS, DemoFolder, DemoJob, config_text, environment
from unbroken.records.lease import acquire
from unbroken.records.process import process_of, this_holder
from unbroken.report.style import Style

PLAIN = Style(color=False)


def prepare(folder: Path) -> DemoFolder:
    return demo_setup.prepare(folder, holder=this_holder(), now_s=time.time(), process_of=process_of)


def test_a_new_folder_holds_a_sound_config_of_a_mixture_with_dropout(tmp_path: Path) -> None:
    places = prepare(tmp_path / "deep" / "it's here")
    config = load(places.config).config
    assert config.model.dropout > 0
    assert config.data.path == str(places.data) and config.data.tokenizer == str(places.tokenizer)
    assert config.data.curriculum is not None and len({phase.mix for phase in config.data.curriculum}) == 2
    tokens = sum(phase.duration_tokens for phase in config.data.curriculum)
    assert tokens == STEPS * (config.training.global_batch_size or 0) * config.data.max_length


def test_the_folder_of_an_earlier_demo_is_started_over(tmp_path: Path) -> None:
    earlier = DemoFolder(tmp_path / "demo")
    earlier.chained.mkdir(parents=True)
    earlier.config.write_text("of an earlier demo")
    gone = replace(this_holder(), pid=2**22 - 1)
    acquire(earlier.folder, gone, token="t", now_s=time.time())
    places = prepare(tmp_path / "demo")
    assert places.config.read_text() == config_text(places)
    assert not places.chained.exists()


@pytest.mark.parametrize("name", ["thesis.tex", "runs", "run.yaml"])
def test_a_folder_of_anybody_else_is_refused_and_nothing_of_it_is_touched(tmp_path: Path, name: str) -> None:
    (tmp_path / "own" / name).mkdir(parents=True)
    with pytest.raises(BadUsage, match=f"contains other files \\({name}\\)"):
        prepare(tmp_path / "own")
    assert os.listdir(tmp_path / "own") == [name]


def test_an_earlier_demo_with_something_of_a_user_in_it_is_refused_too(tmp_path: Path) -> None:
    places = prepare(tmp_path / "demo")
    (tmp_path / "demo" / "notes.txt").touch()
    with pytest.raises(BadUsage, match=r"\(notes.txt\)"):
        prepare(tmp_path / "demo")
    assert places.config.exists()


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(BadUsage, match="is a file"):
        prepare(tmp_path / "file")


def test_a_folder_in_which_a_demo_is_at_work_is_left_to_it(tmp_path: Path) -> None:
    places = prepare(tmp_path / "demo")
    places.chained.mkdir(parents=True)
    # This very process has it, and lives.
    with pytest.raises(RunHeld):
        prepare(tmp_path / "demo")
    assert places.chained.exists()


def test_a_disk_without_room_is_reported_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = LOCAL.space(tmp_path)
    monkeypatch.setattr(Files, "space", lambda *_: replace(found, free_bytes=NEEDED_BYTES - 1))
    with pytest.raises(StorageFailed, match=r"it needs 200\.0 MB"):
        prepare(tmp_path / "demo")
    assert os.listdir(tmp_path / "demo") == []


def test_jobs_see_no_gpu_no_scheduler_and_no_other_launcher() -> None:
    around = {"PATH": "/bin", "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "3", "SLURM_JOB_END_TIME": "1", "HOME": "/"}
    found = environment({**around, "UNBROKEN_MAX_RUNTIME": "1", "UNBROKEN_DRILL": "x", "MASTER_PORT": "1"})
    assert found == {"PATH": "/bin", "HOME": "/", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def test_the_chain_is_killed_stopped_resized_and_killed_while_saving() -> None:
    assert [act.ranks for act in CHAIN] == [2, 1, 3, 2]
    assert [act.end for act in CHAIN] == ["killed", "stopped", "killed-saving", "completed"]
    assert CHAIN[-1].workers != ALONE.workers


def train(run: Path, *, steps: int = 4, first: int | None = None, nudge: float = 0.0) -> Path:
    """A run of a few steps; ``first`` ends its first job early, and ``nudge`` moves a weight after the last step."""
    for until in (None,) if first is None else (first, None):
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 1)
        optimizer = torch.optim.AdamW(model.parameters())
        with unbroken.Run(run, model=model, optimizer=optimizer, settings=unbroken.Settings(save_steps=1)) as held:
            for step in held.steps(steps):
                loss = model(torch.randn(4, 3)).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                held.log(loss=loss)
                if step + 1 == until:
                    held.stop()
                if step + 1 == steps:
                    model.bias.data.add_(nudge)
    return run


def test_two_equal_runs_pass_and_each_job_has_its_row(tmp_path: Path) -> None:
    alone, chained = train(tmp_path / "alone"), train(tmp_path / "chained", first=3)
    proof = demo_report.prove_demo(alone, chained)
    assert proof.exit_code == 0
    assert proof.is_equal and (proof.comparison.agreeing, proof.comparison.steps) == (4, 4)
    acts = (DemoJob(1, 0, "stopped"), DemoJob(1, 2, "completed"))
    rows = demo_report.rows(chained, acts)
    assert [(row.job, row.ranks, row.workers, row.start, row.end) for row in rows] == [(1, 1, 0, 0, 3), (2, 1, 2, 3, 4)]


def test_one_bit_of_one_loss_is_exit_code_3_and_the_step_is_named(tmp_path: Path) -> None:
    alone, chained = train(tmp_path / "alone"), train(tmp_path / "chained")
    [metrics] = (chained / "metrics").iterdir()
    lines = metrics.read_text().splitlines()
    row = json.loads(lines[3])
    row["loss"] += 2.0**-40
    row["bits"]["loss"] = row["loss"].hex()
    metrics.write_text("\n".join([*lines[:3], json.dumps(row), *lines[4:]]) + "\n")
    proof = demo_report.prove_demo(alone, chained)
    assert proof.exit_code == 3
    found = proof.comparison.metrics
    assert (found.agreeing, found.steps) == (3, 4) and found.first is not None
    assert (found.first.step, found.first.metric) == (3, "loss")


def test_the_same_losses_with_another_state_at_the_end_are_exit_code_3(tmp_path: Path) -> None:
    alone, chained = train(tmp_path / "alone"), train(tmp_path / "chained", nudge=2.0**-20)
    proof = demo_report.prove_demo(alone, chained)
    assert proof.comparison.agreeing == 4
    assert proof.comparison.tensors_differing == ("model.bias",)
    assert proof.exit_code == 3


WITHOUT_TORCH = """
import importlib.util, sys
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name == "torch" else find(name, package)
from unbroken.cli.main import main
sys.exit(main(["demo", "--dir", sys.argv[1]]))
"""


def test_without_torch_it_reports_it_and_starts_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WITHOUT_TORCH, str(tmp_path / "demo")]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 2 and "error[torch-missing]" in ended.stderr
    assert not (tmp_path / "demo").exists()


def test_how_it_is_called_is_a_command_that_exists() -> None:
    words = demo_setup.called().split()
    ended = subprocess.run([*words, "--version"], capture_output=True, text=True, check=False)
    assert ended.stdout.startswith("unbroken ")
