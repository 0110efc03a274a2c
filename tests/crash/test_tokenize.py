"""Tokenization under every crash: what a restart makes is, byte for byte, what an undisturbed run makes.

First over a disk in memory, cut short at each of its operations; then as real processes that are really killed.
"""

import atexit
import functools
import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S
from tests.unit.data.texts import DOCUMENTS, lines
from tests.unit.data.texts import tree as files_below
from unbroken.data.corpus.folders import UNFINISHED
from unbroken.data.corpus.listing import LISTING
from unbroken.data.ingest.claims import Participant
from unbroken.data.ingest.encoders import ByteEncoder
from unbroken.data.ingest.planning import change_plan
from unbroken.data.ingest.request import TokenizeOptions, TokenizeRequest
from unbroken.data.ingest.tokenize import tokenize
from unbroken.data.ingest.tokenize_unit import UnitContext, discard_drafts, tokenize_unit
from unbroken.data.ingest.train_tokenizer import train_tokenizer
from unbroken.data.ingest.work_folder import TokenizePlan, UnitRecord, WorkFolder
from unbroken.disk import Disk
from unbroken.errors import BadDocuments, StorageFailed
from unbroken.files import Files
from unbroken.records.lease import Holder
from unbroken.testing import ERRORS, KILLS, MemoryDisk, crash_points, crash_states, tree

OUTPUT = Path("/data/out")
OPTIONS = TokenizeOptions(val_fraction="1/3", shard_tokens=400)


@functools.cache
def _home() -> Path:
    home = Path(tempfile.mkdtemp(prefix="unbroken-texts-"))
    atexit.register(shutil.rmtree, home)
    return home


@functools.cache
def text(kind: str) -> Path:
    """A real folder of text: ``whole``, ``more`` with a file beside, or ``bad`` with a line that cannot be read."""
    folder = _home() / kind
    for name, part in (("a.jsonl", DOCUMENTS[:8]), ("web/b.jsonl", DOCUMENTS[8:16])):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        is_bad = kind == "bad" and name == "web/b.jsonl"
        (folder / name).write_bytes(lines(part) + (b"oops\n" if is_bad else b""))
    if kind == "more":
        (folder / "web" / "c.jsonl").write_bytes(lines(DOCUMENTS[16:20]))
    return folder


def run(disk: Disk, kind: str, *, add: bool = False) -> object:
    asked = TokenizeRequest(text(kind), OUTPUT, "bytes", options=OPTIONS, add=add)
    return tokenize(asked, files=Files(disk), who=another_process())


_PIDS = itertools.count(1)


def another_process() -> Participant:
    """A process that sees of every other one that it is gone."""
    pid = next(_PIDS)
    return Participant(
        Holder("host", pid, "then", "here"),
        process_of=lambda holder: "then" if holder.pid == pid else "",
        new_name=lambda: f"p{pid:07}x{next(_PIDS):07}",
        wait=_never,
    )


def _never(seconds: float) -> None:
    raise AssertionError("nobody is left to wait for")


def nothing_yet() -> MemoryDisk:
    return MemoryDisk(["/data"])


def finished() -> MemoryDisk:
    disk = nothing_yet()
    run(disk, "whole")
    disk.sync_all()
    return disk


def stopped_at_a_bad_line() -> MemoryDisk:
    disk = nothing_yet()
    with pytest.raises(BadDocuments):
        run(disk, "bad")
    # A record of a unit that the repaired text will be cut otherwise than, and a draft of it.
    work = WorkFolder(Files(disk), OUTPUT)
    plan = work.plan()
    assert plan is not None
    work.record(plan, 1, UnitRecord("reference", {}, []))
    Files(disk).make_directory(OUTPUT / "train" / "web")
    Files(disk).write_new(OUTPUT / "train" / "web" / ".draft-old-00000-007.bin", [b"old"])
    disk.sync_all()
    return disk


def tokenizes(disk: Disk) -> object:
    return run(disk, "whole")


def adds(disk: Disk) -> object:
    return run(disk, "more", add=True)


Scene = tuple[Callable[[], MemoryDisk], Callable[[Disk], object]]
SCENES: dict[str, Scene] = {
    "from nothing": (nothing_yet, tokenizes),
    "with a file added": (finished, adds),
    "after a repair": (stopped_at_a_bad_line, tokenizes),
}


def drops_the_engine(disk: Disk) -> None:
    """The records that only a real tokenizer needs."""
    work = WorkFolder(Files(disk), OUTPUT)
    other = WorkFolder(Files(stopped_at_a_bad_line()), OUTPUT)
    plan = other.plan()
    assert plan is not None
    work.begin(plan, tokenizer=b"{}", command="unbroken tokenize --help", scratch=".begin")
    work.record(plan, 0, UnitRecord("reference", {}, []))
    work.forget(plan, 1)
    change_plan(work, plan, replace(plan, engine_dropped="a zebra"), by="me")


def with_drafts() -> MemoryDisk:
    """A tokenization of which a slow attempt at the first unit was overtaken."""
    disk = stopped_at_a_bad_line()
    work, plan = _begun(disk)
    tokenize_unit(_context(work), plan.units[0], "slow")
    disk.sync_all()
    return disk


def discards(disk: Disk) -> None:
    work, plan = _begun(disk)
    discard_drafts(_context(work), plan.units[0], "slow")


def _begun(disk: Disk) -> tuple[WorkFolder, TokenizePlan]:
    work = WorkFolder(Files(disk), OUTPUT)
    plan = work.plan()
    assert plan is not None
    return work, plan


def _context(work: WorkFolder) -> UnitContext:
    return UnitContext(work.files, text("bad"), OUTPUT, OPTIONS, ByteEncoder(), "unbroken tokenize")


def test_drafts_that_are_discarded_leave_no_trace_whenever_that_is_interrupted() -> None:
    expected = _expected(SCENES["after a repair"])
    for trial in crash_points(with_drafts, discards, KILLS):
        for words, disk in (("as it was", trial.disk), *crash_states(trial.disk)):
            tokenizes(disk)
            assert tree(disk) == expected, f"{trial}, {words}"


def trains(disk: Disk) -> object:
    return train_tokenizer(text("whole"), Path("/data/own.json"), vocab_size=270, files=Files(disk))


def test_what_was_there_before_a_repair_leaves_no_trace() -> None:
    assert _expected(SCENES["after a repair"]) == _expected(SCENES["from nothing"])


def _expected(scene: Scene) -> dict[str, str | bytes | None]:
    fresh, action = scene
    disk = fresh()
    action(disk)
    return tree(disk)


@pytest.mark.promise("G12", "X7")
@pytest.mark.parametrize("name", SCENES)
def test_after_a_kill_at_any_operation_the_same_command_makes_the_same_files(name: str) -> None:
    fresh, action = SCENES[name]
    expected = _expected(SCENES[name])
    looked = 0
    for trial in crash_points(fresh, action, KILLS):
        for words, disk in (("as it was", trial.disk), *crash_states(trial.disk)):
            _require_that_readers_know(disk, expected, f"{trial}, {words}")
            action(disk)
            assert tree(disk) == expected, f"{trial}, {words}"
            looked += 1
    assert looked > 200


def _require_that_readers_know(disk: Disk, expected: dict[str, str | bytes | None], words: str) -> None:
    """Either the mark of unfinished work stands there, or all shards are there, or none, or those of before."""
    found = tree(disk)
    if f"data/out/{UNFINISHED}" in found:
        return
    lists = {name for name in found if name.endswith(LISTING)}
    wanted = {name for name in expected if name.endswith(LISTING)}
    if lists == wanted and all(found[name] == expected[name] for name in lists):
        assert found == expected, words
    for name in found:
        if name.endswith((".bin", ".idx")):
            assert found[name] == expected[name], words


@pytest.mark.parametrize("name", SCENES)
def test_a_full_or_sick_disk_is_reported_and_the_same_command_resumes(name: str) -> None:
    fresh, action = SCENES[name]
    expected = _expected(SCENES[name])
    refused = 0
    for trial in crash_points(fresh, action, ERRORS):
        if trial.raised is not None:
            assert isinstance(trial.raised, StorageFailed), str(trial)
            refused += 1
        action(trial.disk)
        assert tree(trial.disk) == expected, str(trial)
    assert refused > 20


def test_a_tokenizer_is_there_whole_or_not_at_all() -> None:
    for trial in crash_points(nothing_yet, trains, KILLS):
        for _, disk in crash_states(trial.disk):
            if Files(disk).find(Path("/data/own.json")) is None:
                trains(disk)
            assert Files(disk).read_bytes(Path("/data/own.json"), limit_bytes=1 << 20) == _trained()


@functools.cache
def _trained() -> bytes:
    disk = nothing_yet()
    trains(disk)
    return Files(disk).read_bytes(Path("/data/own.json"), limit_bytes=1 << 20)


# ---- real processes ----

FOLDERS = 8


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text in as many units as folders, and the shards an undisturbed run makes of it."""
    home = tmp_path_factory.mktemp("kills")
    for number in range(FOLDERS):
        (home / "text" / f"{number}").mkdir(parents=True)
        (home / "text" / f"{number}" / "a.jsonl").write_bytes(lines(DOCUMENTS * 150))
    train_tokenizer(text("whole"), home / "own.json", vocab_size=300)
    tokenize(TokenizeRequest(home / "text", home / "expected", str(home / "own.json"), accelerate=False))
    return home


def start(home: Path, output: Path) -> "subprocess.Popen[str]":
    command = ["tokenize", "--input_dir", "text", "--output_dir", str(output), "--tokenizer_path", "own.json"]
    return subprocess.Popen(
        [sys.executable, "-m", "unbroken", *command, "--num_workers", "2", "--accelerator", "off"],
        cwd=home,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )


def units_done(output: Path) -> int:
    return len(list((output / UNFINISHED).glob("units-*/*.json")))


def wait_until(process: "subprocess.Popen[str]", is_so: Callable[[], bool]) -> None:
    give_up_at = time.monotonic() + PATIENCE_S
    while not is_so() and process.poll() is None:
        assert time.monotonic() < give_up_at
        time.sleep(0.002)


def workers(process: "subprocess.Popen[str]") -> list[int]:
    found = []
    for thread in Path(f"/proc/{process.pid}/task").glob("*/children"):
        found += [int(child) for child in thread.read_text().split()]
    return found


def finish(home: Path, output: Path) -> None:
    process = start(home, output)
    _, said = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, said
    assert files_below(output) == files_below(home / "expected")


@pytest.mark.promise("G12")
def test_killed_again_and_again_it_resumes_and_makes_the_same_files(corpus: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    kills = 0
    for wanted in range(0, FOLDERS, 2):
        process = start(corpus, output)
        wait_until(process, lambda: (output / UNFINISHED).exists() and units_done(output) >= wanted)  # noqa: B023
        helpers = workers(process)
        process.kill()
        process.communicate(timeout=PATIENCE_S)
        kills += process.returncode == -signal.SIGKILL
        # The next start waits for workers that are about to end; they end by themselves.
        give_up_at = time.monotonic() + PATIENCE_S
        while any(Path(f"/proc/{pid}/cmdline").exists() and "worker" in _words(pid) for pid in helpers):
            assert time.monotonic() < give_up_at
            time.sleep(0.01)
    assert kills >= 2
    finish(corpus, output)


def _words(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def test_a_worker_that_is_killed_is_an_error_that_names_what_it_was_at(corpus: Path, tmp_path: Path) -> None:
    process = start(corpus, tmp_path / "out")
    wait_until(process, lambda: any("unbroken.data.ingest.worker_process" in _words(pid) for pid in workers(process)))
    victim = next(pid for pid in workers(process) if "unbroken.data.ingest.worker_process" in _words(pid))
    os.kill(victim, signal.SIGKILL)
    _, said = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1
    assert "error[worker-died]" in said and "was killed by SIGKILL" in said and "a.jsonl" in said
    finish(corpus, tmp_path / "out")


def test_an_interrupt_ends_it_with_130_and_says_that_the_same_command_resumes(corpus: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    process = start(corpus, output)
    wait_until(process, lambda: units_done(output) >= 1)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130, said
    assert "run the same command again to resume" in said and "Traceback" not in said
    finish(corpus, output)
