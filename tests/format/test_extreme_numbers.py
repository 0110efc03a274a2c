"""Every number in every record in turn becomes one that no writer writes; no reading command ends in a traceback."""

import contextlib
import io
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import pytest

from tests.unit.store.saving import save
from unbroken.cli.main import main
from unbroken.config.document import Config
from unbroken.errors import UnbrokenError
from unbroken.launch import job_files
from unbroken.launch.job_files import JobOutcome
from unbroken.records.drill import ENVIRONMENT, Drill, Fault, read_drill, write_drill
from unbroken.records.goodput import measured
from unbroken.records.journal import Journal, read_journal
from unbroken.records.layout import Layout
from unbroken.records.lease import Holder, acquire
from unbroken.records.metrics import MetricsWriter, lost_values, read_metrics
from unbroken.records.snapshot import RunState, RunStateWriter
from unbroken.records.stop import request_stop
from unbroken.store.directory import Store
from unbroken.store.dumps import Pointer, choose_dumps, make_area, point, read_pointers
from unbroken.store.envelope import canonical, opened, sealed
from unbroken.store.rewind import rewind
from unbroken.store.sweep import pin

pytestmark = pytest.mark.promise("U17")

# What a field becomes, as it stands in the file. JSON itself has no NaN; readers of Python take it all the same.
HOSTILE: Final = {
    "huge float": "1e308",
    "negative": "-1",
    "huge whole": "1" + "0" * 400,
    "NaN": "NaN",
    "Infinity": "Infinity",
    "text": '"\\u001b[2J"',
    "null": "null",
    "deep": "[" * 10_000 + "]" * 10_000,
}
# By the table of exit codes: done, usage, damaged, data, nothing usable, not exact, held, training, storage.
CODES: Final = frozenset({0, 2, 3, 4, 5, 6, 7, 8, 74})
_PLACE: Final = "\x00here\x00"
_NOW_S: Final = 1_700_000_000.0


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with one record of each kind, written by those who write them, held by a job on another machine."""
    run = tmp_path_factory.mktemp("extreme") / "run"
    layout, store = Layout(run), Store(run / "checkpoints")
    run.mkdir()
    for step in (1, 2, 3):
        save(
            store,
            step,
            metrics={"loss": 0.5},
            metadata={"world_size": 2, "data": {"samples": 8, "digest": "d", "agrees": True}},
        )
    rewind(store, ["checkpoint-3", "checkpoint-2", "checkpoint-1"], target="checkpoint-2", job="j0001_a", at_ns=5)
    pin(store, "checkpoint-1", reason="kept", job="j0001_a", at_ns=5)
    acquire(run, Holder("elsewhere", 1, "x"), token="a", now_s=time.time())
    _write_journal(layout)
    RunStateWriter(layout, scratch=".s", clock=time.time).write(
        RunState("stopped", pid=7, step=3, max_steps=9, tokens=5, loss=0.5, started_at_s=_NOW_S, job=1, exit_code=0),
        durable=True,
    )
    metrics = MetricsWriter(layout, 1, start=0)
    metrics.write(1, {"loss": 0.5, "tokens": 3})
    metrics.write(2, {"loss": 0.25})
    metrics.close()
    request_stop(layout, job=1, by="login", scratch=".s")
    make_area(run, job="j0001_a")
    point(run, Pointer(0, 2, 9, "j0001_a", "elsewhere", str(run / "dumps/a"), str(run / "dumps/a")))
    layout.config.write_text(json.dumps(Config().values()))
    write_drill(run / "drill.json", Drill(save_steps=2, stop_at=5, faults=(Fault("edge", "kill", 2, 0, 0.5),)))
    job_files.write_outcome(run / "outcome.json", JobOutcome(str(run), "stopped", 0, "again", "x"))
    return run


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that sleeping moves on: who watches a lease of another machine does not really wait."""
    now = [time.monotonic()]
    monkeypatch.setattr(time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    monkeypatch.setattr(time, "monotonic", lambda: now[0])


def _write_journal(layout: Layout) -> None:
    clock = iter(_NOW_S + 10 * each for each in range(99))
    journal = Journal(layout, 1, clock=lambda: next(clock))
    process = asdict(Holder("elsewhere", 1, "x"))
    placement = {"scheduler": "slurm", "id": "12", "requeues": 1, "nodes": "n1"}
    journal.write("job-start", world_size=2, processes=[process], deadline_s=_NOW_S + 3600, placement=placement)
    journal.write("deadline", at_s=_NOW_S + 7200)
    journal.write("resume", step=1, name="checkpoint-1")
    for step in (1, 2):
        journal.write("save", step=step)
        journal.write("commit", step=step, name=f"checkpoint-{step}", seconds=1.5, paused_s=0.5, bytes=10)
    journal.write("recomputed", compared=3, agreeing=2)
    journal.write("mismatch", step=2, metric="loss", first_job=1, first_bits="0x1", second_job=1, second_bits="0x2")
    journal.write("emergency-save", step=2, seconds=0.5)
    journal.write("job-end", status="stopped", exit_code=0, verdict="again", reason="x", step=3)
    journal.close()


def _commands(run: Path) -> Iterator[list[str]]:
    here = str(run)
    yield from (["status", here], ["ls", here], ["show", here], ["outcome", here])
    yield from (["verify", here], ["prune", here, "--keep-last-k", "1", "--dry-run"], ["plan", here], ["stop", here])
    yield ["plan", here, "--step-time", "1", "--save-time", "1", "--steps", "10"]


def _require_told(arguments: list[str], what: str) -> None:
    # Text and JSON are made from the same facts: both where most of them are shown, one of them elsewhere.
    for json_too in ([], ["--json"]) if arguments[0] in ("status", "outcome") else (["--json"],):
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main([*arguments, *json_too])
        said = out.getvalue() + err.getvalue()
        assert "internal-error" not in said and "Traceback" not in said, (what, arguments, said[:2000])
        assert code in CODES, (what, arguments, code, said[:2000])
        assert "\x1b" not in said, (what, arguments)


def _numbers(value: object, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Where the numbers in a decoded JSON value are."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        if isinstance(inner, int | float) and not isinstance(inner, bool):
            yield (*path, key)
        yield from _numbers(inner, (*path, key))


def _variants(text: str) -> Iterator[tuple[str, str]]:
    """The text of a record with one number replaced, and what was done."""
    for path in _numbers(json.loads(text)):
        body: Any = json.loads(text)
        inner = body
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = _PLACE
        spelled = json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        for name, hostile in HOSTILE.items():
            yield f"{'.'.join(map(str, path))} is {name}", spelled.replace(json.dumps(_PLACE), hostile)


@contextlib.contextmanager
def _changed(path: Path) -> Iterator[Callable[[bytes], int]]:
    before = path.read_bytes()
    try:
        yield path.write_bytes
    finally:
        path.write_bytes(before)


RECORDS: Final = (
    "lease:.lease/000001.json",
    "run state:.run_state.json",
    "stop request:.shutdown_requested",
    "emergency pointer:emergency/rank-00000.json",
    "rewind:checkpoints/.rewinds/000001.json",
)


@pytest.mark.parametrize("record", RECORDS, ids=lambda each: each.partition(":")[0])
def test_every_command_reports_a_record_with_an_extreme_number(run: Path, record: str) -> None:
    path = run / record.partition(":")[2]
    with _changed(path) as change:
        for what, text in _variants(path.read_text()):
            change(text.encode())
            for arguments in _commands(run):
                _require_told(arguments, what)


def test_every_command_reports_an_event_with_an_extreme_number(run: Path) -> None:
    path = run / "journal/job-0001.jsonl"
    lines = path.read_text().splitlines()
    with _changed(path) as change:
        for number, line in enumerate(lines):
            for what, text in _variants(line):
                change("\n".join([*lines[:number], text, *lines[number + 1 :], ""]).encode())
                measured(read_journal(Layout(run)))
                for arguments in (["status", str(run)], ["outcome", str(run)], ["plan", str(run)]):
                    _require_told(arguments, what)


def test_a_metric_that_is_an_extreme_number_is_read_or_counted_as_torn(run: Path) -> None:
    path = run / "metrics/job-0001.jsonl"
    lines = path.read_text().splitlines()
    with _changed(path) as change:
        for number, line in enumerate(lines):
            for what, text in _variants(line):
                change("\n".join([*lines[:number], text, *lines[number + 1 :], ""]).encode())
                found = read_metrics(Layout(run))
                steps = [*found.kept, *lost_values(Layout(run), job=2, start=0).lost]
                assert all(0 <= step < 1 << 63 for step in steps), what


def test_a_manifest_with_an_extreme_number_is_a_damaged_one(run: Path) -> None:
    path = run / "checkpoints/checkpoint-2/manifest.json"
    envelope = opened(path.read_bytes())
    assert envelope is not None
    with _changed(path) as change:
        for what, text in _variants(envelope.body.decode()):
            with contextlib.suppress(ValueError, RecursionError):
                text = canonical(json.loads(text)).decode()
            change(sealed(text.encode(), envelope.form))
            for arguments in _commands(run):
                _require_told(arguments, what)


def test_a_config_with_an_extreme_number_is_refused_by_name_or_planned(run: Path, tmp_path: Path) -> None:
    whole = Config().values()
    whole["training"].update(output_dir=str(run), max_runtime_seconds=3600.0, walltime_reserve_seconds=10.0)
    path = tmp_path / "config.json"
    for what, text in _variants(json.dumps({"training": whole["training"], "optimizer": whole["optimizer"]})):
        path.write_text(text)
        for arguments in (["validate", str(path)], ["plan", str(path), "--step-time", "1", "--save-time", "1"]):
            _require_told(arguments, what)


def test_a_drill_and_an_outcome_file_with_extreme_numbers_are_refused_by_name(run: Path) -> None:
    readers: dict[str, Callable[[Path], object]] = {
        "drill.json": lambda path: read_drill({ENVIRONMENT: str(path)}),
        "outcome.json": job_files.read_job_outcome,
    }
    for name, read in readers.items():
        with _changed(run / name) as change:
            for _, text in _variants((run / name).read_text()):
                change(text.encode())
                with contextlib.suppress(UnbrokenError):
                    read(run / name)


def test_a_world_of_pointers_that_no_cluster_has_is_not_counted_through(run: Path) -> None:
    path = run / "emergency/rank-00000.json"
    with _changed(path) as change:
        change(path.read_text().replace('"world_size": 2', f'"world_size": {10**18}').encode())
        assert read_pointers(run) == []
        assert choose_dumps([], read_pointers(run), is_newer=lambda _: True).dump_set is None


@pytest.mark.parametrize("option", ["--steps", "--step-time", "--save-time", "--mtbf", "--max-runtime"])
def test_an_option_with_an_extreme_number_is_a_mistake_of_the_command(option: str) -> None:
    asked = {"--steps": "10", "--step-time": "1", "--save-time": "1", "--mtbf": "9999", "--max-runtime": "999"}
    for value in ("1e308", "-1", "1" + "0" * 400, "nan", "inf", "x"):
        words = [word for pair in {**asked, option: value}.items() for word in pair]
        _require_told(["plan", *words], f"{option} is {value}")
