"""Escape sequences and bidirectional controls in names and records: no command lets them reach a terminal."""

import contextlib
import io
import json
import re
import time
from pathlib import Path

import pytest

from tests.unit.store.saving import save
from unbroken.cli.main import main
from unbroken.records.journal import Journal
from unbroken.records.layout import Layout
from unbroken.records.lease import Holder, acquire
from unbroken.records.snapshot import RunState, RunStateWriter
from unbroken.store.directory import Store
from unbroken.store.dumps import Pointer, point

pytestmark = pytest.mark.promise("U17")

EVIL = "\x1b[2J\x1b]0;owned\x07\u202egnp.exe\u2066\r\nforged: line\x9b"
OURS = re.compile(r"\x1b\[(?:0|1|2|32|33|1;31)m")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in which every text that somebody else could choose is hostile."""
    run = tmp_path_factory.mktemp("hostile") / f"run{EVIL.replace('/', '')}"
    run.mkdir()
    layout, store = Layout(run), Store(run / "checkpoints")
    metadata = {f"fact{EVIL}": EVIL, "data": {"samples": 1, "digest": EVIL, "agrees": False}}
    save(store, 1, metrics={f"loss{EVIL}": 0.5}, metadata=metadata)
    save(store, 2, metrics={f"loss{EVIL}": 0.5}, metadata=metadata)
    (store.root / f"mine{EVIL}").mkdir()
    (store.root / "checkpoint-2" / f"part{EVIL}").write_text("")
    acquire(run, Holder(f"host{EVIL}", 1, "x"), token="a", now_s=1.0)
    journal = Journal(layout, 1, clock=lambda: 5.0)
    placement = {"scheduler": EVIL, "id": EVIL, "requeues": 1, "nodes": EVIL}
    journal.write("job-start", placement=placement)
    journal.write("recomputed", compared=2, agreeing=1)
    journal.write("mismatch", step=1, metric=EVIL, first_job=1, first_bits=EVIL, second_bits=EVIL)
    journal.write("job-end", status="error", exit_code=1, verdict="look", reason=f"ValueError: {EVIL}", step=1)
    journal.close()
    RunStateWriter(layout, scratch=".s", clock=lambda: 5.0).write(RunState("error", step=1, error=EVIL, job=1))
    point(run, Pointer(0, 1, 9, "j0001_a", EVIL, EVIL))
    return run


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that sleeping moves on: who watches a lease of another machine does not really wait."""
    now = [time.monotonic()]
    monkeypatch.setattr(time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    monkeypatch.setattr(time, "monotonic", lambda: now[0])


def _said(arguments: list[str]) -> str:
    out, err = Terminal(), Terminal()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        main(arguments)
    return out.getvalue() + err.getvalue()


def test_no_command_lets_a_hostile_text_steer_the_terminal(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    here = str(run)
    commands = [
        *(["status", here], ["ls", here], ["show", here, "--tensors"], ["outcome", here]),
        # Quietly: the progress bar is painted by rich.
        ["verify", here, "--quiet"],
        *(["prune", here, "--keep-last-k", "1", "--dry-run"], ["diff", f"{here}@1", f"{here}@2"], ["plan", here]),
        *(["stop", here], ["status", f"{here}{EVIL}"], ["show", f"{here}@{EVIL}"], [f"nothing{EVIL}"]),
        *(["ls", here, f"--option{EVIL}"], ["explain", EVIL], ["prune", here, "--keep-best", f"min:{EVIL}"]),
        *(["doctor", here, "--no-torch"], ["doctor", f"{here}{EVIL}", "--no-torch"]),
        *(["validate", f"{here}/{EVIL}.yaml"], ["slurm", "init", "--run-dir", EVIL, "--", "x.py"]),
        *(["kubernetes", "--image", EVIL, "--name", EVIL, "--run-dir", EVIL, "--", EVIL],),
    ]
    for arguments in commands:
        said = _said(arguments)
        bare = OURS.sub("", said).replace("\n", "")
        assert bare and not {each for each in EVIL if not each.isprintable()} & set(bare), (arguments[0], said)
        assert not any(line.startswith("forged: line") for line in said.splitlines()), (arguments[0], said)
        assert "internal-error" not in said, (arguments[0], said)


def test_json_carries_the_texts_exactly(run: Path) -> None:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        main(["status", str(run), "--json"])
    assert out.getvalue().isascii()
    assert json.loads(out.getvalue())["error"] == EVIL
