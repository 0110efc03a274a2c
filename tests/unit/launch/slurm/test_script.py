"""The text of a batch script: what it asks for, that bash reads it as meant, and how early it warns."""

import json
import subprocess
from pathlib import Path

import pytest

from unbroken.errors import BadUsage
from unbroken.launch.slurm.script import (
    ScriptRequest,
    Work,
    further_options,
    learned_runs,
    script_text,
    time_limit_s,
    whole_lead,
)
from unbroken.launch.slurm.submit import LEAST_S, lead_s
from unbroken.records.journal import Journal
from unbroken.records.layout import Layout

ECHO = "import json, os, sys; print(json.dumps(sys.argv[1:]))"


def _request(folder: Path, **changes: object) -> ScriptRequest:
    asked: dict[str, object] = {"name": "a", "folder": folder, "python": "/opt/a b/python", "lead_s": 120, **changes}
    return ScriptRequest(**asked)  # type: ignore[arg-type]


def _run(text: str, folder: Path, **environ: str) -> list[str]:
    """Let bash run a script whose python only tells what it was given; returns those words."""
    python = folder / "python"
    python.write_text(f"#!/bin/sh\nexec {__import__('sys').executable} -c '{ECHO}' \"$@\"\n")
    python.chmod(0o755)
    (folder / "scontrol").write_text("#!/bin/sh\nprintf 'n1\\nn2\\n'\n")
    (folder / "scontrol").chmod(0o755)
    (folder / "a.sbatch").write_text(text.replace("'/opt/a b/python'", str(python)))
    surroundings = {"PATH": f"{folder}:/usr/bin:/bin", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_ID": "7", **environ}
    command = ["bash", str(folder / "a.sbatch"), *environ.get("WORDS", "").split()]
    said = subprocess.run(command, env=surroundings, capture_output=True, text=True, check=False)
    assert said.returncode == 0, said.stderr
    words: list[str] = json.loads(said.stdout)
    return words


def test_the_job_is_the_last_process_of_the_script_and_starts_the_step(tmp_path: Path) -> None:
    text = script_text(Work(("runs/a",), ("run.yaml",), ("a.b=c d",)), _request(tmp_path), tmp_path / "a.sbatch")
    words = _run(text, tmp_path, WORDS="--link --chained")
    assert words[:4] == ["-m", "unbroken", "slurm", "job"]
    assert words[4:9] == ["runs/a", "--script", str(tmp_path / "a.sbatch"), "--link", "--chained"]
    step = words[words.index("--") + 1 :]
    assert step[:3] == ["srun", "--nodes=2", "--ntasks=2"]
    # A rank that fails first must not take the words from the one that tells the outcome.
    assert "--kill-on-bad-exit=0" in step
    assert step[step.index("train") :] == ["train", "run.yaml", "a.b=c d"]


def test_every_node_gets_its_rank_and_the_rendezvous_endpoint(tmp_path: Path) -> None:
    request = _request(tmp_path, nodes="2", ranks_per_node="8")
    text = script_text(Work(("runs/a",), (), ("train.py", "it's", "a b")), request, tmp_path / "a.sbatch")
    words = _run(text, tmp_path)
    shell = words[words.index("bash") :]
    environ = {"SLURM_JOB_NUM_NODES": "2", "SLURM_NODEID": "1", "MASTER_ADDR": "n1", "MASTER_PORT": "20007"}
    said = subprocess.check_output(shell, env={**environ, "PATH": "/usr/bin:/bin"}, text=True)
    node = json.loads(said)
    assert node[:3] == ["-m", "unbroken", "run"]
    assert node[3:11] == ["--nnodes", "2", "--node-rank", "1", "--master-addr", "n1", "--master-port", "20007"]
    assert node[11:] == ["--nproc-per-node", "8", "--run-dir", "runs/a", "--", "train.py", "it's", "a b"]
    assert "export MASTER_ADDR=$(scontrol show hostnames" in text


def test_each_task_of_an_array_takes_its_own_config_and_run(tmp_path: Path) -> None:
    work = Work(("runs/a", "runs/b c"), ("a.yaml", "b c.yaml"))
    text = script_text(work, _request(tmp_path), tmp_path / "a.sbatch")
    assert "#SBATCH --array=0-1\n" in text and "#SBATCH --output=slurm-a-%A_%a.out\n" in text
    words = _run(text, tmp_path, SLURM_ARRAY_TASK_ID="1")
    assert words[4] == "runs/b c" and words[-1] == "b c.yaml"


def test_the_number_of_a_task_stands_for_its_mark_in_every_word(tmp_path: Path) -> None:
    work = Work(("runs/s%a",), (), ("train.py", "--seed", "%a", "100%"))
    text = script_text(work, _request(tmp_path, array="3-5"), tmp_path / "a.sbatch")
    words = _run(text, tmp_path, SLURM_ARRAY_TASK_ID="4")
    assert words[4] == "runs/s4" and words[-3:] == ["--seed", "4", "100%"]


def test_the_warning_comes_to_the_script_alone_and_lines_follow_those_of_before(tmp_path: Path) -> None:
    text = script_text(Work(("runs/a",), ("run.yaml",)), _request(tmp_path, time="04:00:00"), tmp_path / "a.sbatch")
    for line in ("--signal=B:USR1@120", "--open-mode=append", "--requeue", "--time=04:00:00", "--ntasks-per-node=1"):
        assert f"#SBATCH {line}\n" in text
    assert learned_runs(text) == [tmp_path / "runs/a"]
    given = script_text(Work(("r",), ("c",)), _request(tmp_path, learns_lead=False), tmp_path / "a.sbatch")
    assert learned_runs(given) == []


def test_options_of_sbatch_come_last_and_replace_ours(tmp_path: Path) -> None:
    further = further_options(["qos=long", "--mem=0", "output=x y"])
    text = script_text(Work(("r",), ("c",)), _request(tmp_path, further=further), tmp_path / "a.sbatch")
    assert "#SBATCH --qos=long\n#SBATCH --mem=0\n" in text
    assert '#SBATCH --output="x y"\n' in text and text.count("--output") == 1


@pytest.mark.parametrize("word", ["qos", "=x", "Q=1", "signal=USR1@1", "a b=c"])
def test_an_unknown_option_of_sbatch_is_refused(word: str) -> None:
    with pytest.raises(BadUsage, match="--sbatch"):
        further_options([word])


def test_a_value_that_would_break_the_script_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadUsage, match="--account"):
        script_text(Work(("r",), ("c",)), _request(tmp_path, account="a\n#SBATCH -x"), tmp_path / "a.sbatch")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 5400),
        ("2:30", 150),
        ("04:00:00", 14400),
        ("1-12", 129600),
        ("1-0:30", 88200),
        ("UNLIMITED", None),
        ("0", None),
    ],
)
def test_limits_are_read_as_sbatch_reads_them(text: str, seconds: int | None) -> None:
    assert time_limit_s(text) == seconds


@pytest.mark.parametrize("text", ["", "soon", "4h", "1:2:3:4", "-5"])
def test_a_malformed_time_limit_is_refused(text: str) -> None:
    with pytest.raises(BadUsage, match="--time"):
        time_limit_s(text)


def test_the_lead_is_learned_from_the_slowest_save_of_any_run(tmp_path: Path) -> None:
    assert lead_s([tmp_path / "none"], 36_000) == 120
    assert lead_s([tmp_path / "none"], 300) == LEAST_S
    for name, seconds in (("a", 100.0), ("b", 300.5)):
        journal = Journal(Layout(tmp_path / name), 1, clock=lambda: 0.0)
        journal.write("commit", seconds=seconds)
        journal.close()
    assert lead_s([tmp_path / "a", tmp_path / "b"], None) == 606
    assert whole_lead(1e9, LEAST_S) == 65_535


@pytest.mark.promise("U17")
@pytest.mark.parametrize(
    "hostile", ["runs/a\ntouch injected", "runs/a\rtouch injected", "a\u2028b", "a\x1b[2J", "a\x00b"]
)
def test_a_run_directory_that_would_break_a_comment_line_is_refused_by_name(tmp_path: Path, hostile: str) -> None:
    script = Work((hostile,), words=("train.py",))
    for work, name in ((script, "--run-dir"), (Work((hostile,), ("run.yaml",)), "training.output_dir")):
        with pytest.raises(BadUsage, match=f"{name} .* contains a line break or control character"):
            script_text(work, _request(tmp_path), tmp_path / "a.sbatch")
    with pytest.raises(BadUsage, match="the working directory"):
        script_text(Work(("runs/a",), ("run.yaml",)), _request(tmp_path / hostile), tmp_path / "a.sbatch")


@pytest.mark.promise("U17")
def test_every_other_word_reaches_the_job_exactly_and_runs_nothing(tmp_path: Path) -> None:
    words = ("train.py", "a\ntouch injected", "$(touch injected)", "`touch injected`", "';touch injected;'", "\x1b[2J")
    path = tmp_path / "a\ntouch injected.sbatch"
    text = script_text(Work(("runs/$(touch injected)",), words=words), _request(tmp_path), path)
    said = _run(text, tmp_path)
    assert said[-len(words) :] == list(words)
    assert said[4] == "runs/$(touch injected)" and str(path) in said
    assert not (tmp_path / "injected").exists()
    assert all(line.isprintable() for line in text.split("\n"))


@pytest.mark.promise("U17")
@pytest.mark.parametrize("field", ["name", "partition", "account", "time", "output", "array", "gpus_per_node"])
def test_a_directive_with_a_line_break_is_refused(tmp_path: Path, field: str) -> None:
    for hostile in ("a\ntouch x", "a\x0b", 'a"'):
        with pytest.raises(BadUsage, match="cannot be written into a batch script"):
            script_text(Work(("runs/a",), ("run.yaml",)), _request(tmp_path, **{field: hostile}), tmp_path / "a.sbatch")
