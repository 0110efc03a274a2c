"""Several processes, or the workers of an engine, at one output folder; and what each of them reports."""

import os
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.unit.data.test_tokenize import request
from tests.unit.data.test_tokenize import text as text
from tests.unit.data.texts import DOCUMENTS, lines, tree
from unbroken.data import TokenizeOptions, tokenize_with
from unbroken.data.ingest import units
from unbroken.data.ingest.claims import Participant, joined
from unbroken.data.ingest.encoders import ByteEncoder
from unbroken.data.ingest.engine import do_in_engine
from unbroken.data.ingest.tokenize import tokenize
from unbroken.data.ingest.tokenize_unit import UnitContext, discard_drafts, do_unit, tokenize_unit
from unbroken.data.ingest.work_folder import TokenizePlan, WorkFolder
from unbroken.errors import BadDocuments, TokenizeBusy, TokenizedDifferently, TokenizeNotShared
from unbroken.files import LOCAL
from unbroken.records.lease import Holder
from unbroken.records.process import this_holder

Progress = Callable[[int], AbstractContextManager[Callable[[int], None]]]


def beside(other: Callable[[], object]) -> Progress:
    """A progress bar during which another process does something."""

    def progress(total_bytes: int) -> AbstractContextManager[Callable[[int], None]]:
        other()
        return nullcontext(lambda _: None)

    return progress


@pytest.mark.promise("G12")
def test_the_same_command_twice_at_the_same_time_shares_the_work(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(units, "UNIT_BYTES", 1000)
    tokenize(request(text, "expected"))
    first = tokenize(request(text), progress=beside(lambda: tokenize(request(text))))
    assert first.new_units == 0 and first.other_units > 3 and first.totals.documents == len(DOCUMENTS)
    assert first.engine == "nothing was encoded" and first.is_new
    assert tree(text / "data/train") == tree(text / "expected")


def test_another_process_with_other_options_or_other_text_is_refused_while_the_first_works(text: Path) -> None:
    def others() -> None:
        with pytest.raises(TokenizedDifferently):
            tokenize(request(text, options=TokenizeOptions(shard_tokens=99)))
        (text / "text" / "a.jsonl").write_bytes(lines(["repaired"]))
        with pytest.raises(TokenizeBusy):
            tokenize(request(text, patience_seconds=0.0))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tokenize(request(text), progress=beside(others))
    assert tokenize(request(text)).totals.documents == 26


def begun(text: Path) -> tuple[WorkFolder, TokenizePlan]:
    """A tokenization of two units of which none is done."""
    with pytest.raises(KeyboardInterrupt):
        tokenize(request(text), progress=beside(_interrupt))
    work = WorkFolder(LOCAL, text / "data/train")
    plan = work.plan()
    assert plan is not None and len(plan.units) == 2
    return work, plan


def test_a_unit_of_a_living_process_is_not_taken(text: Path) -> None:
    work, plan = begun(text)
    alive = Participant(this_holder())
    with joined(work, plan, alive, _unheard) as first:
        taken = first.take()
        with joined(work, plan, alive, _unheard) as second:
            assert {taken, second.take()} == {0, 1}
            assert second.take() is None
    # Their leases are released: now they are free, to a process on another machine too.
    with joined(work, plan, Participant(Holder("elsewhere", 1, "then")), _unheard) as third:
        assert {third.take(), third.take()} == {0, 1}


@pytest.mark.promise("G12")
def test_of_two_attempts_at_a_unit_the_first_record_counts_and_the_other_leaves_its_shards_alone(text: Path) -> None:
    work, plan = begun(text)
    options = request(text).options
    context = UnitContext(LOCAL, text / "text", work.output, options, ByteEncoder(), "unbroken tokenize")
    slow = tokenize_unit(context, plan.units[0], "slow")
    assert do_unit(work, plan, context, 0, "quick", lambda _: None).counts
    assert not work.record(plan, 0, slow)
    assert not do_unit(work, plan, context, 0, "late", lambda _: None).counts
    discard_drafts(context, plan.units[0], "slow")
    found = work.unit(plan, 0)
    assert found is not None and found.attempt == "quick"
    assert sorted(path.name for path in work.output.glob(".draft-*")) == [
        ".draft-quick-00000-000.bin",
        ".draft-quick-00000-000.idx",
    ]
    # A shard that went away since is made again by whoever finishes.
    (work.output / ".draft-quick-00000-000.bin").unlink()
    tokenize(request(text))
    tokenize(request(text, "expected"))
    assert tree(work.output) == tree(text / "expected")


def _unheard(sentence: str) -> None:
    """Nobody waits here."""


def _interrupt() -> None:
    raise KeyboardInterrupt


# ---- engines ----


class Twice(Executor):
    """An engine that takes every worker for dead once, and runs its task again."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:  # noqa: ANN401
        future: Future[Any] = Future()
        fn(*args, **kwargs)
        future.set_result(fn(*args, **kwargs))
        return future


@pytest.mark.promise("G12")
@pytest.mark.parametrize("engine", [lambda: ThreadPoolExecutor(2), Twice], ids=["threads", "twice"])
def test_the_tasks_of_an_engine_make_the_files_of_one_process(
    engine: Callable[[], Executor], text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(units, "UNIT_BYTES", 1000)
    expected = tokenize(request(text, "expected"))
    monkeypatch.chdir(text)
    asked = replace(request(text), input_dir=Path("text"), output_dir=Path("data/train"))
    with engine() as executor:
        report = tokenize_with(executor, asked, in_flight=3)
        assert report == expected
        assert not tokenize_with(executor, asked).is_new
    assert tree(text / "data/train") == tree(text / "expected")


def test_an_error_in_a_task_is_raised_with_its_fields(text: Path) -> None:
    (text / "text" / "bad.jsonl").write_bytes(b"oops\n")
    with ThreadPoolExecutor(2) as executor, pytest.raises(BadDocuments) as refusal:
        tokenize_with(executor, request(text))
    assert refusal.value.problems[0].startswith("bad.jsonl:1")


def test_a_worker_that_does_not_see_the_folder_is_reported_with_its_host(text: Path, tmp_path: Path) -> None:
    class Elsewhere(ThreadPoolExecutor):
        def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:  # noqa: ANN401
            settings, number = args
            return super().submit(do_in_engine, {**settings, "output_dir": str(tmp_path / "absent")}, number)

    with Elsewhere(1) as executor, pytest.raises(TokenizeNotShared) as refusal:
        tokenize_with(executor, request(text))
    assert refusal.value.host == os.uname().nodename
