"""``unbroken train`` as a person meets it: a fresh folder, the words of the docs, and every kind of ending."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.exact.gpt_world import tokenize_text, write_text
from tests.patience import PATIENCE_S
from unbroken.records.journal import Event, read_history
from unbroken.records.layout import Layout
from unbroken.records.metrics import read_metrics

TOOL = [sys.executable, "-m", "unbroken"]
# Small enough for seconds, and slow enough to be stopped on the way.
SMALL = ("model.n_layer=1", "model.n_embd=32", "model.n_head=2", "training.eval_steps=4", "training.max_eval_batches=2")
SHORT = (
    *SMALL,
    "training.max_steps=8",
    "optimizer.warmup_steps=2",
    "training.save_steps=3",
    "training.logging_steps=1",
)
LONG = (*SMALL, "training.max_steps=100000", "data.epochs=null", "training.save_steps=5", "training.logging_steps=1")
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


class Folder:
    """A fresh folder with data, in which the tool is called."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.run = path / "runs" / "tiny"

    def start(self, *arguments: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [*TOOL, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=self.path,
            env=ENVIRONMENT,
        )

    def call(self, *arguments: str) -> tuple[int, str]:
        process = self.start(*arguments)
        said, _ = process.communicate(timeout=PATIENCE_S)
        return process.returncode, said

    def query(self, *arguments: str) -> dict[str, Any]:
        said = subprocess.run(
            [*TOOL, *arguments, "--json"], capture_output=True, text=True, cwd=self.path, env=ENVIRONMENT, check=False
        )
        facts: dict[str, Any] = json.loads(said.stdout)
        return facts

    def of_kind(self, kind: str) -> list[Event]:
        """The events of a kind in the journal of the run."""
        return read_history(Layout(self.run)).of_kind(kind)

    def layout(self) -> set[str]:
        """What stands in the run's directory, and the checkpoints by name."""
        names = {each.name for each in self.run.iterdir() if not each.name.startswith(".lease")}
        checkpoints = self.run / "checkpoints"
        return names | {f"checkpoints/{each.name}" for each in checkpoints.iterdir() if not each.name.startswith(".")}


RECORDS = {"config.json", ".run_state.json", "tokenizer", "logs", "journal", "metrics", "checkpoints"}


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    tokenize_text(write_text(tmp_path / "text"), tmp_path / "data")
    code, said = Folder(tmp_path).call("init", "--preset", "tiny", "-o", "run.yaml")
    assert code == 0, said
    return Folder(tmp_path)


def wait_for(process: "subprocess.Popen[str]", word: str) -> str:
    """Read on until a line holds a word."""
    assert process.stdout is not None
    said = ""
    for line in process.stdout:
        said += line
        if word in line:
            return said
    raise AssertionError(f"{word!r} was not said:\n{said}")


@pytest.mark.promise("G2", "G22")
def test_by_the_words_of_the_page_a_fresh_folder_trains_to_the_end(tmp_path: Path) -> None:
    write_text(tmp_path / "text")
    here = Folder(tmp_path)
    for words in (
        "tokenize --input-dir text/train --output-dir data/train --tokenizer-path bytes",
        "tokenize --input-dir text/val --output-dir data/val --tokenizer-path bytes",
        "init --preset tiny -o run.yaml",
        "validate run.yaml",
    ):
        code, said = here.call(*words.split())
        assert code == 0, said
    code, said = here.call("train", "--config", "run.yaml", *SHORT, "--training.keep_best", "val_loss:min")
    assert code == 0, said
    assert here.layout() >= RECORDS | {"checkpoints/final", "checkpoints/latest"}
    assert here.query("outcome", "runs/tiny")["class"] == "done"
    assert here.query("status", "runs/tiny")["status"] == "completed"
    evaluated = here.query("evaluate", "runs/tiny", "--max-eval-batches", "2")
    rows = [json.loads(line) for line in (here.run / "metrics" / "job-0001.jsonl").read_text().splitlines()]
    assert evaluated["val_loss"] == rows[-1]["val_loss"], "the checkpoint computes what the training logged"
    code, said = here.call("evaluate", "runs/tiny", "--device", "tpu")
    assert code == 2 and "error[device-missing]" in said, said
    code, said = here.call("train", "run.yaml", *SHORT, "--training.keep_best", "val_loss:min")
    assert code == 0 and [each.whole("step") for each in here.of_kind("resume")] == [0, 8], said
    computed_by = {row.job for row in read_metrics(Layout(here.run)).kept.values()}
    assert computed_by == {1}, "a run that is complete computes nothing more"


def test_json_is_one_object_a_line_and_status_shows_which_step_its_loss_is_of(folder: Folder) -> None:
    words = ["train", "run.yaml", *SHORT, "training.logging_steps=4", "--json"]

    def lines(*more: str, **environ: str) -> tuple[int, list[dict[str, Any]], str]:
        ended = subprocess.run(
            [*TOOL, *words, *more], capture_output=True, text=True, cwd=folder.path, env={**ENVIRONMENT, **environ},
            check=False, timeout=PATIENCE_S,
        )  # fmt: skip
        return ended.returncode, [json.loads(line) for line in ended.stdout.splitlines()], ended.stderr

    # Stopped in the middle by the time limit that scripts of GPT-Simple set; the loss is read every fourth step.
    code, events, said = lines(GPT_SIMPLE_MAX_RUNTIME="1e-9")
    assert code == 2 and events[-1]["event"] == "end" and "GPT_SIMPLE_MAX_RUNTIME" in said + str(events)
    code, events, said = lines()
    assert code == 0 and said, "text for people goes to standard error"
    assert {each["schema"] for each in events} == {"unbroken.train/1"}
    kinds = [each["event"] for each in events]
    assert kinds[0] == "start" and kinds[-1] == "end" and {"step", "evaluation", "checkpoint"} <= set(kinds)
    steps = [(each["step"], each["loss"] > 0) for each in events if each["event"] == "step"]
    assert steps == [(4, True), (8, True)]
    saved = [(each["step"], each["name"]) for each in events if each["event"] == "checkpoint"]
    assert (3, "checkpoint-3") in saved and (8, "final") in saved
    assert events[-1]["class"] == "done" and events[-1]["exit_code"] == 0
    status = folder.query("status", "runs/tiny")
    assert (status["step"], status["loss_step"]) == (8, 8)
    assert status["loss"] == next(each["loss"] for each in reversed(events) if each["event"] == "step")
    code, events, said = lines("training.seed=7")
    assert code == 6 and [each["event"] for each in events] == ["error"] and events[0]["kind"] == "config-differs"
    assert not said


def test_a_reader_that_goes_away_is_reported_once_and_quiet_is_an_option_or_a_variable(folder: Folder) -> None:
    run = folder.path / "new\nline"
    words = [*TOOL, "train", "run.yaml", *SHORT, "training.eval_steps=null", f"training.output_dir={run}"]
    process = subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=folder.path, env=ENVIRONMENT
    )
    assert process.stdout is not None and process.stderr is not None
    first = next(line for line in process.stdout if line.startswith("run "))
    process.stdout.close()
    said = process.stderr.read()
    process.stderr.close()
    assert process.wait(PATIENCE_S) == 0, said
    assert "/new\\nline," in first, "a path with a line break takes one line"
    assert said.count("Broken pipe") == 1, said
    assert "Traceback" not in said and "Logging error" not in said and "Exception ignored" not in said
    assert folder.query("status", str(run))["step"] == 8, "it trained on"
    quiet = subprocess.run(
        words, capture_output=True, text=True, cwd=folder.path, env={**ENVIRONMENT, "UNBROKEN_QUIET": "1"}, check=True
    )
    assert (quiet.stdout, quiet.stderr) == ("", "")
    code, said = folder.call("train", "run.yaml", *SHORT, "--force")
    assert code == 2 and "error[bad-usage]" in said and "--force" in said, said


def test_a_model_that_fits_into_no_memory_is_reported_in_a_few_lines(folder: Folder) -> None:
    code, said = folder.call("train", "run.yaml", "model.n_embd=400000", "model.n_head=4")
    assert code == 2, said
    assert "error[device-full]" in said
    assert "Traceback" not in said and len(said.splitlines()) < 12


@pytest.mark.promise("G2", "G8")
def test_a_signal_stops_it_cleanly_and_the_same_command_resumes_with_another_number_of_ranks(folder: Folder) -> None:
    command = ("train", "run.yaml", *LONG, "--stopped-exit-code", "75")
    process = folder.start(*command, "--nproc-per-node", "2")
    said = wait_for(process, "saved checkpoint-5 ")
    process.send_signal(signal.SIGTERM)
    rest, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 75, said + rest
    shutdowns = [each for each in folder.layout() if each.endswith("-shutdown")]
    assert len(shutdowns) == 1
    assert folder.layout() >= RECORDS
    assert folder.query("outcome", "runs/tiny")["status"] == "stopped"
    recorded = (folder.run / "config.json").read_bytes()
    process = folder.start(*command)
    said = wait_for(process, "saved checkpoint")
    assert [(each.whole("step") or 0) > 0 for each in folder.of_kind("resume")] == [False, True]
    process.send_signal(signal.SIGINT)
    rest, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 75, said + rest
    assert (folder.run / "config.json").read_bytes() == recorded, "it is written once"


@pytest.mark.promise("G2")
def test_killed_it_leaves_a_run_that_reads_as_crashed_and_another_job_meanwhile_is_refused(folder: Folder) -> None:
    process = folder.start("train", "run.yaml", *LONG)
    wait_for(process, "saved checkpoint-5 ")
    code, said = folder.call("train", "run.yaml", *LONG)
    assert code == 7 and "error[run-held]" in said, said
    state = json.loads((folder.run / ".run_state.json").read_text())
    os.kill(state["pid"], signal.SIGKILL)
    process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 128 + signal.SIGKILL
    assert folder.layout() >= RECORDS
    assert any(each.startswith("checkpoints/checkpoint-") for each in folder.layout())
    assert folder.query("outcome", "runs/tiny")["status"] == "crashed"


@pytest.mark.promise("G18", "G2")
def test_data_that_does_not_suffice_is_refused_and_with_leave_the_run_halts_where_it_is_exhausted(
    folder: Folder,
) -> None:
    few = (*SHORT, "training.max_steps=1000000")
    code, said = folder.call("train", "run.yaml", *few)
    assert code == 4 and "error[data-unfit]" in said, said
    assert not (folder.run / "checkpoints").exists()
    large = ("training.per_device_batch_size=50", "training.global_batch_size=400", "training.eval_steps=null")
    code, said = folder.call("train", "run.yaml", *few, *large, "--allow-bucket-exhaustion")
    assert code == 4 and "error[halted]" in said, said
    assert folder.query("outcome", "runs/tiny")["status"] == "halted"
    assert any(each.endswith("-shutdown") for each in folder.layout())
    dry_at = folder.query("status", "runs/tiny")["step"]
    again = ("data.epochs=2", "--accept", "data.epochs", "--allow-bucket-exhaustion")
    code, said = folder.call("train", "run.yaml", *few, *large, *again)
    assert code == 4 and folder.of_kind("resume")[-1].whole("step") == dry_at, said
    assert folder.query("status", "runs/tiny")["step"] >= 2 * dry_at, "past the halt, to the end of the second pass"


def test_an_accepted_name_that_means_nothing_is_refused_with_the_nearest_ones(folder: Folder) -> None:
    for name, nearest in (("training.max_step", "training.max_steps"), ("model.n_emdb", "model.n_embd")):
        code, said = folder.call("train", "run.yaml", *SHORT, "--accept", name)
        assert code == 2 and "error[accept-unknown]" in said and nearest in said, said
        assert "Traceback" not in said and not (folder.run / "checkpoints").exists()


@pytest.mark.promise("G5")
def test_another_config_is_refused_before_any_process_and_an_accepted_one_continues(folder: Folder) -> None:
    assert folder.call("train", "run.yaml", *SHORT)[0] == 0
    began = time.monotonic()
    refused = folder.query("train", "run.yaml", *SHORT, "model.n_embd=64", "optimizer.learning_rate=1e-4")
    assert (refused["kind"], refused["exit_code"]) == ("config-differs", 6)
    assert [line.split(":")[0] for line in refused["details"]] == ["model.n_embd", "optimizer.learning_rate"]
    assert time.monotonic() - began < PATIENCE_S
    longer = (*SHORT, "training.max_steps=10")
    code, said = folder.call("train", "run.yaml", *longer, "--accept", "training.max_steps")
    assert code == 0, said
    # The first command again: the accepted target is the run's, and the newest end is `final`.
    code, said = folder.call("train", "run.yaml", *SHORT)
    assert code == 0 and [each.whole("step") for each in folder.of_kind("resume")] == [0, 8, 10], said
    assert folder.query("show", "runs/tiny@final")["step"] == 10


def test_all_problems_of_a_config_are_reported_at_once_and_nothing_is_started(folder: Folder) -> None:
    wrong = ("model.n_head=5", "data.max_length=4096", "training.seeed=1")
    refused = folder.query("train", "run.yaml", *wrong)
    assert (refused["kind"], refused["exit_code"], len(refused["details"])) == ("config-invalid", 2, 3)
    code, said = folder.call("train", "run.yaml", "--nproc-per-node", "3", "training.global_batch_size=8")
    assert code == 2 and "error[too-many-ranks]" in said, said
    code, said = folder.call("train", "run.yaml", "--nproc-per-noed", "3")
    assert code == 2 and "--nproc-per-node?" in said, said
    code, said = folder.call("train", "run.yaml", *SHORT, "model.vocab_size=100")
    assert code == 4 and "error[data-unfit]" in said and "model.vocab_size" in said, said
    assert not folder.run.exists()
    folder.path.joinpath("data").rename(folder.path / "elsewhere")
    code, said = folder.call("train", "run.yaml", *SHORT)
    assert code == 4 and "error[data-missing]" in said, said


def test_checkpoints_go_to_an_object_store_and_a_wiped_run_directory_is_resumed(folder: Folder) -> None:
    words = ("train", "run.yaml", *SHORT, f"training.checkpoints=file://{folder.path}/store/tiny")
    (folder.path / "store").mkdir()
    code, said = folder.call(*words, "training.max_steps=4")
    assert code == 0, said
    assert not [name for name in folder.layout() if name.startswith("checkpoints/")]
    # The history is in the store: a changed model is refused as ever.
    code, said = folder.call(*words, "model.n_layer=2")
    assert code == 6 and "error[config-differs]" in said, said
    assert folder.query("status", "runs/tiny")["resumable_step"] == 4
    shutil.rmtree(folder.run)
    code, said = folder.call(*words)
    assert code == 0 and [each.whole("step") for each in folder.of_kind("resume")] == [4], said
    assert folder.query("outcome", "runs/tiny")["class"] == "done"
    assert {row["name"] for row in folder.query("ls", "runs/tiny")["entries"]} >= {"final", "final.2"}
