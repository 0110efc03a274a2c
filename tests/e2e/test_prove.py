"""``unbroken prove`` let loose on a small script and on the trainer, with a fixed seed; and what it refuses."""

import json
import os
import shlex
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.exact.gpt_world import tokenize_text, write_text
from tests.patience import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]
PROVE = [sys.executable, "-m", "unbroken", "prove"]
# A chain is seven jobs, one after the other: no hang before that, even in a test of a mutation, which waits for less.
LIMIT_S = max(PATIENCE_S, 240.0)
SCRIPT = [sys.executable, str(Path(__file__).with_name("proven_script.py"))]


def prove(folder: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    # torch leaves a folder of its own among the temporary ones.
    temporary = folder.with_name(f"{folder.name}-temporary")
    temporary.mkdir(exist_ok=True)
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(temporary)}
    return subprocess.run(
        [*PROVE, *words], cwd=folder, env=environ, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )


def left_behind(folder: Path) -> list[str]:
    """What proofs left among the temporary files."""
    return [path.name for path in folder.with_name(f"{folder.name}-temporary").glob("unbroken-*")]


def parsed(ended: "subprocess.CompletedProcess[str]") -> dict[str, Any]:
    facts: dict[str, Any] = json.loads(ended.stdout)
    return facts


def write(folder: Path, name: str, text: str) -> list[str]:
    (folder / name).write_text(text)
    return [sys.executable, name]


@pytest.mark.promise("G1")
def test_a_script_survives_a_chain_of_faults_bit_for_bit_and_its_real_run_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "runs" / "a").mkdir(parents=True)
    (tmp_path / "runs" / "a" / "mine").write_text("not yours")
    # It is given the place of the proof and does not use it: it is sent there all the same.
    command = [*SCRIPT, "runs/a", "40", "{run}"]
    ended = prove(tmp_path, "--json", "--chain", "1", "--seed", "7", "--", *command)
    facts = parsed(ended)
    assert ended.returncode == 0, ended.stdout
    assert ended.stderr == ""
    assert facts["is_proven"]
    [chain] = facts["chains"]
    assert chain["comparison"]["agreeing"] == chain["comparison"]["steps"] == 40
    assert chain["comparison"]["state"]["tensors_differing"] == []
    assert len(chain["jobs"]) >= 3
    assert chain["jobs"][-1]["ended"] == "completed"
    assert facts["injected"] >= 4
    # Each job went on from a checkpoint of another, but for those before the first commit.
    assert any(job["went_on_from"] for job in chain["jobs"])
    assert [path.name for path in (tmp_path / "runs" / "a").iterdir()] == ["mine"]
    # What worked leaves nothing behind.
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]
    assert left_behind(tmp_path) == []


@pytest.mark.promise("G1")
def test_the_trainer_survives_on_changing_numbers_of_ranks(tmp_path: Path) -> None:
    tokenize_text(write_text(tmp_path / "text"), tmp_path / "data")
    tool = [sys.executable, "-m", "unbroken"]
    subprocess.run([*tool, "init", "--preset", "tiny", "-o", "run.yaml"], cwd=tmp_path, check=True, capture_output=True)
    small = ("model.n_layer=1", "model.n_embd=32", "model.n_head=2", "training.eval_steps=4")
    short = ("training.max_eval_batches=2", "training.max_steps=24", "optimizer.warmup_steps=2")
    options = ("--faults", "kill,save,resize,flip", "--seed", "5", "--chain", "1", "--json")
    ended = prove(tmp_path, *options, "--", "unbroken", "train", "run.yaml", *small, *short)
    facts = parsed(ended)
    assert ended.returncode == 0, ended.stdout
    [chain] = facts["chains"]
    assert {job["ranks"] for job in chain["jobs"]} == {1, 2}
    assert chain["comparison"]["agreeing"] == 24
    assert "val_loss" in chain["comparison"]["metrics"]
    # The config says where its run is; the proof went elsewhere.
    assert not (tmp_path / "runs").exists()


FORGETFUL = """
import sys, torch, unbroken
torch.manual_seed(1)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
decay = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
items = {"model": model} if sys.argv[1] == "forgets" else {"model": model, "optimizer": optimizer, "decay": decay}
settings = unbroken.Settings(audit="off")
with unbroken.Run(sys.argv[2] if len(sys.argv) > 2 else "runs/a", settings=settings, **items) as run:
    for step in run.steps(24):
        loss = (model(torch.randn(8, 4)) - 1).square().mean()
        optimizer.zero_grad(); loss.backward(); optimizer.step(); decay.step()
        run.log(loss=loss)
"""


def test_a_script_that_forgets_its_optimizer_is_found_out_and_the_evidence_stays(tmp_path: Path) -> None:
    command = [*write(tmp_path, "train.py", FORGETFUL), "forgets", "{run}"]
    ended = prove(tmp_path, "--json", "--faults", "save", "--seed", "2", "--dir", "proof", "--", *command)
    assert ended.returncode == 3, ended.stdout + ended.stderr
    [chain] = parsed(ended)["chains"]
    assert not chain["is_proven"]
    assert chain["comparison"]["first"]["metric"] == "loss"
    # The same seed and chain have the same faults; the unit tests of the schedule show it.
    words = shlex.split(chain["rerun"])
    assert words[:2] == ["unbroken", "prove"] and words[words.index("--") :] == ["--", *command]
    assert {("--seed", "2"), ("--chain", "1"), ("--faults", "save")} <= set(pairwise(words))
    # The evidence stays, and can be looked at; the words that stand for the run led there and nowhere else.
    assert {path.name for path in tmp_path.iterdir()} == {"train.py", "proof"}
    assert (tmp_path / "proof" / "prove-2" / "chain-0001" / "journal").is_dir()


def test_a_script_that_starts_over_fails_although_its_bits_are_the_same(tmp_path: Path) -> None:
    forget = "import shutil; shutil.rmtree(sys.argv[2] + '/checkpoints', ignore_errors=True)\n"
    anew = FORGETFUL.replace("torch.manual_seed(1)\n", f"torch.manual_seed(1)\n{forget}")
    command = [*write(tmp_path, "train.py", anew), "remembers", "{run}"]
    ended = prove(tmp_path, "--json", "--faults", "save", "--seed", "2", "--chain", "1", "--", *command)
    assert ended.returncode == 3, ended.stdout
    [chain] = parsed(ended)["chains"]
    assert chain["problem"] and not chain["is_proven"]


# ---- what is refused ----

NOISY = FORGETFUL.replace("torch.manual_seed(1)", "")


def test_a_script_that_differs_from_itself_is_reported_with_the_step_and_what_to_look_at(tmp_path: Path) -> None:
    limits = ("--faults", "save", "--chain", "1")
    ended = prove(tmp_path, *limits, "--", *write(tmp_path, "train.py", NOISY), "remembers")
    assert ended.returncode == 3
    assert ended.stdout == ""
    for word in ("error[not-deterministic]", "two uninterrupted runs", "step 1 is the first that differs: loss"):
        assert word in ended.stderr
    assert "torch.manual_seed" in ended.stderr


TRAINING = """
import sys, torch, unbroken
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters())
with unbroken.Run("runs/a", model=model, optimizer=optimizer) as run:
    for step in run.steps(int(sys.argv[2])):
        optimizer.step()
        if sys.argv[1] == "leaves" and step == 1:
            break
        if sys.argv[1] == "fails" and step == 2:
            raise RuntimeError("no more data")
if sys.argv[1] == "twice":
    with unbroken.Run("runs/b", model=model, optimizer=optimizer) as run:
        pass
"""


@pytest.mark.parametrize(
    ("script", "arguments", "kind", "words"),
    [
        ("print('hello from here')", [], "nothing-to-prove", ["never entered an unbroken.Run", "| hello from here"]),
        ("raise SystemExit('no GPU')", [], "baseline-fails", ["exit code 1", "| no GPU"]),
        (TRAINING, ["trains", "2"], "nothing-to-prove", ["its run has 2 steps"]),
        (TRAINING, ["leaves", "9"], "nothing-to-prove", ["its run has 2 steps"]),
        (TRAINING, ["fails", "9"], "baseline-fails", ["exit code 1", "| RuntimeError: no more data"]),
        (TRAINING, ["twice", "9"], "nothing-to-prove", ["entered 2 runs", "enters one of them"]),
    ],
    ids=["no-run", "fails-before", "too-short", "left-early", "fails", "two-runs"],
)
def test_a_command_that_has_nothing_to_prove_is_reported_with_the_reason(
    tmp_path: Path, script: str, arguments: list[str], kind: str, words: list[str]
) -> None:
    ended = prove(tmp_path, "--", *write(tmp_path, "train.py", script), *arguments)
    assert ended.returncode == 2
    assert f"error[{kind}]" in ended.stderr
    assert "Traceback" not in ended.stderr.partition("the end of its output:")[0]
    for word in words:
        assert word in ended.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"train.py"}
    assert left_behind(tmp_path) == []


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ([], "missing COMMAND"),
        (["--minutes", "0", "--", "python3", "x"], "--minutes"),
        (["--faults", "kill,melt", "--", "python3", "x"], "unknown fault 'melt'; known faults: kill, rank, save"),
        (["--faults", ",", "--", "python3", "x"], "--faults is empty"),
        (["--faults", "resize", "--", "python3", "x"], "no fault is left"),
        (["--ranks", "1,0", "--", "python3", "{ranks}"], "--ranks must be a list of numbers from 1 to 64"),
        (["--ranks", "1,2", "--", "python3", "x"], "--ranks needs {ranks} in COMMAND"),
        (["--", "no-such-program"], "no program 'no-such-program'"),
        (["--", "train.py"], "did you mean `python train.py`?"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_wrong_command_line_is_refused_before_anything_runs(tmp_path: Path, words: list[str], complaint: str) -> None:
    ended = prove(tmp_path, *words)
    assert ended.returncode == 2
    assert complaint in ended.stderr
    assert list(tmp_path.iterdir()) == []
