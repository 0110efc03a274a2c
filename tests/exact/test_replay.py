"""`unbroken replay`: a true history is recomputed bit for bit in another world, a tampered one is found out."""

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Tool
from tests.e2e import proven_script
from tests.exact import gpt_world
from tests.exact.gpt_world import Job, tiny, tokenize_text, write_text
from tests.unit.store.saving import tree
from unbroken.config import Config
from unbroken.records.drill import ENVIRONMENT, Drill, write_drill
from unbroken.testing.worlds import logs, spawn

SCRIPT = Path(proven_script.__file__)


def trained(config: Config, *jobs: Job) -> Path:
    for job in jobs:
        ended = spawn(job.ranks, gpt_world.train, config, job)
        assert job.kill_in or all(each.is_good for each in ended), logs(ended)
    return Path(config.training.output_dir)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    folder = tmp_path_factory.mktemp("replay")
    data = tokenize_text(write_text(folder / "text"), folder / "data")
    return tiny(data, folder / "run", max_steps=6, save_steps=2, eval_steps=3, keep_last_k=5)


@pytest.fixture(scope="module")
def made(config: Config) -> Path:
    """A run of three jobs: one rank, two that are killed on the way, three to the end."""
    return trained(config, Job(ranks=1, stop_at=2), Job(ranks=2, kill_in=5), Job(ranks=3))


@pytest.fixture
def copied(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made, tmp_path / "run", symlinks=True)
    return tmp_path / "run"


def replayed(unbroken: Tool, *arguments: str | Path) -> tuple[int, dict[str, Any]]:
    ended = unbroken("replay", "--json", *arguments)
    assert ended.stderr == "", ended.stderr
    return ended.returncode, json.loads(ended.stdout)


@pytest.mark.promise("X4", "G1")
@pytest.mark.parametrize("ranks", [1, 3])
def test_a_history_of_one_two_and_three_ranks_is_recomputed_on_any_number(
    made: Path, unbroken: Tool, ranks: int
) -> None:
    before = tree(made)
    ends = {1: ("2", "final"), 3: ("4", "latest")}[ranks]
    code, found = replayed(unbroken, made, *ends, "--nproc-per-node", str(ranks))
    assert code == 0, found
    assert found["world_size"] == ranks and found["is_equal"] and found["directory"] is None
    assert found["metrics"]["agreeing"] == found["metrics"]["steps"] == found["steps"]
    assert {"loss", "grad_norm", "lr", "tokens"} <= set(found["metrics"]["names"])
    # Weights, both moments, steps, generators; and the position in the data among the values.
    assert found["state"]["tensors"] > 50 and found["state"]["values"] >= 6 and not found["state"]["by_rank"]
    assert tree(made) == before


@pytest.mark.promise("X4")
def test_a_checkpoint_of_another_seed_in_the_place_of_the_true_one_is_found_out(
    config: Config, copied: Path, tmp_path: Path, unbroken: Tool
) -> None:
    training = replace(config.training, output_dir=str(tmp_path / "other"), seed=7, max_steps=4, eval_steps=None)
    other = trained(replace(config, training=training), Job())
    shutil.rmtree(copied / "checkpoints" / "checkpoint-4")
    shutil.copytree(other / "checkpoints" / "final", copied / "checkpoints" / "checkpoint-4")
    assert unbroken("verify", copied, "--full").returncode == 0, "every byte of it is what was written"
    code, found = replayed(unbroken, copied, "2", "4", "--dir", tmp_path / "again")
    assert code == 3 and not found["is_equal"]
    assert found["metrics"]["first"] is None, "the losses are still those of the true history"
    assert any(name.startswith("model.") for name in found["state"]["tensors_differing"])
    assert any("data" in each for each in found["state"]["values_differing"])
    # What was recomputed is kept to be looked at, under the name that the run has for it.
    assert (tmp_path / "again/run/checkpoints/checkpoint-4").is_dir()
    assert unbroken("diff", copied / "checkpoints" / "checkpoint-4", f"{tmp_path / 'again' / 'run'}@4").returncode == 3


def edit_bits(metrics: Path) -> None:
    for path in metrics.iterdir():
        path.write_text(path.read_text().replace('"bits": {"loss": "0x1.', '"bits": {"loss": "0x1.0'))


@pytest.mark.promise("X4")
def test_edited_metrics_are_found_out_and_the_first_step_is_named(copied: Path, unbroken: Tool) -> None:
    edit_bits(copied / "metrics")
    ended = unbroken("replay", copied, "4", "6")
    assert ended.returncode == 3
    first, *rest = ended.stdout.splitlines()
    assert first.startswith("differs  2 steps recomputed on 1 rank; they do not lead from checkpoint-4 to final")
    assert any("step 5 " in line and "0x1.0" in line for line in rest)
    assert any(line.strip().startswith("all 57 tensors") for line in rest), "the states are still equal"
    assert "recomputation kept in" in rest[-1]
    shutil.rmtree(rest[-1].split()[-1])


@pytest.mark.parametrize("end", ["checkpoint-2-shutdown", "checkpoint-4"])
def test_a_damaged_end_is_named_before_anything_is_computed(
    copied: Path, unbroken: Tool, end: str, tmp_path: Path
) -> None:
    [part] = (copied / "checkpoints" / end / "state").glob("__0_0.distcp")
    data = bytearray(part.read_bytes())
    data[len(data) // 2] ^= 1
    part.write_bytes(data)
    ended = unbroken("replay", copied, "2", "4", "--dir", tmp_path / "again")
    assert ended.returncode == 3
    assert "error[damaged-checkpoint]" in ended.stderr and end in ended.stderr
    assert not (tmp_path / "again" / "run").exists()


def test_another_arithmetic_is_exit_code_6_as_a_resume_says(made: Path, unbroken: Tool, tmp_path: Path) -> None:
    ended = unbroken("replay", made, "4", "6", "--dir", tmp_path / "again", env={"OMP_NUM_THREADS": "2"})
    assert ended.returncode == 6
    assert "error[replay-unfinished]" in ended.stderr
    assert "arithmetic-differs" in ended.stderr and "threads:" in ended.stderr


def test_data_that_is_not_there_is_exit_code_4_and_where_it_is_can_be_given(
    config: Config, copied: Path, unbroken: Tool, tmp_path: Path
) -> None:
    moved = tmp_path / "moved"
    shutil.copytree(config.data.path, moved)
    ended = unbroken("replay", copied, "4", "6", "--data-path", "nowhere", "--dir", tmp_path / "first")
    assert ended.returncode == 4 and "error[data-missing]" in ended.stderr
    assert unbroken("replay", copied, "4", "6", "--data-path", moved).returncode == 0


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a script that knows nothing of replays, in two jobs."""
    run = tmp_path_factory.mktemp("scripted") / "run"
    for stop in (4, 8):
        drill = run.parent / "drill.json"
        write_drill(drill, Drill(stop_at=stop))
        ended = spawn(1, proven_script.main, str(run), 12, env={ENVIRONMENT: str(drill)})
        assert ended[0].is_good, logs(ended)
    return run


@pytest.mark.promise("X4")
def test_a_run_of_any_script_is_recomputed_by_the_command_that_made_it(scripted: Path, unbroken: Tool) -> None:
    before = tree(scripted)
    code, found = replayed(unbroken, scripted, "4", "8", "--", SCRIPT, scripted, "12")
    assert code == 0, found
    assert found["metrics"]["agreeing"] == 4
    assert tree(scripted) == before, "the script was told the run's own directory, and did not write there"


Words = Callable[[Path], list[str | Path]]
REFUSED: dict[str, tuple[Words, int, str]] = {
    "the same step twice": (lambda run: ["4", "4"], 2, "both at step 4"),
    "the later one first": (lambda run: ["8", "4"], 2, "give the earlier one first"),
    "a step without a checkpoint": (lambda run: ["4", "7"], 2, "no checkpoint is called '7'"),
    "no command": (lambda run: ["4", "8"], 2, "so its command is unknown"),
    "no such program": (lambda run: ["4", "8", "--", "no-such-program"], 2, "no program at this path"),
    "no run": (lambda run: ["4", "8", "--", sys.executable, "-c", "pass"], 3, "never entered a Run"),
    "a script that ends before": (lambda run: ["4", "8", "--", SCRIPT, run, "6"], 3, "did not reach step 8"),
    "ranks that cannot be told": (
        lambda run: ["4", "8", "--nproc-per-node", "2", "--", sys.executable, "train.py"],
        2,
        "put {ranks} in place of their number",
    ),
    "data of a script": (lambda run: ["4", "8", "--data-path", "x", "--", "a.py"], 2, "--data-path is for runs of"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_recomputed_is_refused_with_a_reason(scripted: Path, unbroken: Tool, case: str) -> None:
    words, code, said = REFUSED[case]
    before = tree(scripted)
    arguments = words(scripted)
    ended = unbroken("replay", scripted, "--dir", "again", *arguments)
    assert (ended.returncode, said in ended.stderr) == (code, True), ended.stderr
    assert "Traceback" not in ended.stderr
    assert tree(scripted) == before


def test_a_directory_that_is_not_empty_is_never_written_into(scripted: Path, unbroken: Tool, tmp_path: Path) -> None:
    (tmp_path / "again").mkdir()
    (tmp_path / "again" / "mine").touch()
    ended = unbroken("replay", scripted, "4", "8", "--dir", tmp_path / "again", "--", SCRIPT, scripted)
    assert ended.returncode == 2 and ended.stderr.startswith("error[")
    assert [path.name for path in (tmp_path / "again").iterdir()] == ["mine"]
