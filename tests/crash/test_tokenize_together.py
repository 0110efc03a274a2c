"""Several processes at one tokenization: whoever is killed, stopped or taken for dead, the files are those of one.

First over a disk in memory, where another process runs whole inside each operation of the first; then real processes.
"""

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from tests.crash.test_tokenize import OUTPUT, SCENES, Scene, nothing_yet, start, text, units_done, wait_until, workers
from tests.crash.test_tokenize import _words as words_of
from tests.crash.test_tokenize import corpus as corpus
from tests.patience import PATIENCE_S
from tests.unit.data.texts import tree as files_below
from unbroken.data.ingest.claims import Participant
from unbroken.data.ingest.request import TokenizeOptions, TokenizeRequest
from unbroken.data.ingest.tokenize import tokenize
from unbroken.files import Files
from unbroken.records.lease import Holder
from unbroken.testing import Fault, FaultyDisk, Kill, Operation, tree


def expected(scene: Scene) -> dict[str, str | bytes | None]:
    fresh, action = scene
    disk = fresh()
    action(disk)
    return tree(disk)


class Interruption:
    """A plan of faults that does something else inside the n-th change."""

    def __init__(self, nth: int, meanwhile: Callable[[], object]) -> None:
        self.nth = nth
        self.meanwhile = meanwhile
        self.seen = 0

    def __call__(self, operation: Operation) -> Fault | None:
        self.seen += operation.is_mutating
        if operation.is_mutating and self.seen == self.nth:
            self.meanwhile()
        return None


@pytest.mark.promise("G12", "X7")
@pytest.mark.parametrize("name", SCENES)
def test_a_process_that_is_stopped_anywhere_and_taken_for_dead_does_no_damage(name: str) -> None:
    fresh, action = SCENES[name]
    wanted = expected(SCENES[name])
    nth = 0
    while True:
        nth += 1
        disk = fresh()
        interruption = Interruption(nth, lambda: action(disk))  # noqa: B023 - called at once
        action(FaultyDisk(disk, interruption))
        assert tree(disk) == wanted, f"another process ran before change {nth}"
        if interruption.seen < nth:
            break
    assert nth > 50


def test_a_process_that_is_killed_leaves_its_unit_to_another_machine_only_after_its_lease_has_expired() -> None:
    options = TokenizeOptions(val_fraction="1/3", shard_tokens=400)
    request = TokenizeRequest(text("whole"), OUTPUT, "bytes", options=options)
    disk = nothing_yet()

    def strikes(operation: Operation) -> Fault | None:
        return Kill("before") if ".draft-" in operation.path.name else None

    first = Participant(Holder("node-1", 1, "then", "a"), new_name=lambda: "first")
    with pytest.raises(BaseException, match="draft"):
        tokenize(request, files=Files(FaultyDisk(disk, strikes)), who=first)
    clock = [1000.0]
    said: list[str] = []

    def wait(seconds: float) -> None:
        clock[0] += seconds
        assert clock[0] < 2000.0, "it waits for ever"

    other = Participant(
        Holder("node-2", 1, "then", "b"),
        process_of=lambda _: None,
        new_name=lambda: "other",
        monotonic=lambda: clock[0],
        wait=wait,
    )
    report = tokenize(request, files=Files(disk), who=other, say=said.append)
    assert clock[0] >= 1060.0 and said == ["waiting for 1 unit in progress in 1 other process"]
    assert (report.new_units, report.other_units, report.kept_units) == (2, 0, 0)
    assert tree(disk) == expected(SCENES["from nothing"])


# ---- real processes ----


@pytest.mark.promise("G12")
def test_of_three_commands_two_are_killed_and_the_third_makes_the_files_of_one(corpus: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    commands = [start(corpus, output) for _ in range(3)]
    killed, sleepers = 0, list[int]()
    for number, victim in enumerate(commands[:2]):
        wait_until(victim, lambda: units_done(output) >= 1 + 2 * number)  # noqa: B023
        # Its workers are stopped with it, and wake up when their units have long been done by others.
        asleep = workers(victim)
        for pid in asleep:
            os.kill(pid, signal.SIGSTOP)
        victim.kill()
        # Not communicate: its stopped workers hold its standard error open.
        victim.wait(timeout=PATIENCE_S)
        assert victim.stderr is not None
        victim.stderr.close()
        killed += victim.returncode == -signal.SIGKILL
        sleepers += asleep
    _, said = commands[2].communicate(timeout=PATIENCE_S)
    assert commands[2].returncode == 0, said
    assert killed, "both were done before they could be killed"
    for pid in sleepers:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    give_up_at = time.monotonic() + PATIENCE_S
    while any("worker_process" in words_of(pid) for pid in sleepers):
        assert time.monotonic() < give_up_at
        time.sleep(0.01)
    assert files_below(output) == files_below(corpus / "expected")
    late = start(corpus, output)
    late.communicate(timeout=PATIENCE_S)
    assert late.returncode == 0
    assert files_below(output) == files_below(corpus / "expected")
