"""``unbroken doctor``: checks this machine: torch and its GPUs, gloo, exactness, and the file system of a directory."""

import os
import secrets
import signal
import sys
import textwrap
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Final

import click

from unbroken.cli.output import Output, as_command
from unbroken.doctor.file_system import Surroundings, examine
from unbroken.doctor.finding import CheckResult, Severity
from unbroken.doctor.machine import examine_memory, examine_python, examine_torch
from unbroken.errors import BadUsage
from unbroken.quoting import amounts
from unbroken.quoting.terminal import printable
from unbroken.report.style import Style

EXIT_PROBLEMS: Final = 3
_MOUNTS: Final = Path("/proc/self/mountinfo")
_WIDTH: Final = 80
_ENDING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@as_command(
    "doctor",
    examples=(
        ("unbroken doctor", "this machine and the current directory"),
        ("unbroken doctor /scratch/runs", "and where the runs will be"),
        ("unbroken doctor /scratch/runs --no-torch", "the file system only, without torch"),
        ("unbroken doctor --json", "for a script"),
    ),
    exit_codes={0: "no problems (there may be notes)", 3: "there are problems; all of them are listed"},
)
@click.argument("place", metavar="[DIR]", default=".", type=click.Path(readable=False))
@click.option("--no-torch", is_flag=True, help="Skip torch, GPUs, gloo and the exact self-test.")
def command(output: Output, place: str, no_torch: bool) -> int:
    """Check torch, GPUs, exactness and the file system of DIR.

    Trains a tiny model on one rank and on two, replicated and sharded, in each precision, and compares the bits. Tries
    out what the file system of DIR can do, and measures its speed, in a scratch directory that is removed again.

    Lists all findings; what is not listed as ok failed or could not be tested.
    """
    if not place:
        # An empty variable of a shell, which would otherwise mean the current directory.
        raise BadUsage(command="unbroken doctor", complaint="DIR is empty")
    directory = Path(place)
    with _unwinding():
        findings = list(_examined(directory, output, no_torch=no_torch))
    problems = [each for each in findings if each.level is Severity.PROBLEM]
    fields = {
        "directory": place,
        "is_sound": not problems,
        "findings": [{**asdict(each), "level": each.level.value} for each in findings],
    }
    output.document("unbroken.doctor/1", fields, lambda: _text(findings, output.style))
    return EXIT_PROBLEMS if problems else 0


def _examined(directory: Path, output: Output, *, no_torch: bool) -> Iterator[CheckResult]:
    yield from examine_python()
    if not no_torch:
        output.note("testing torch: this takes a few seconds ...")
        yield from examine_torch()
    yield examine_memory(time.monotonic)
    around = Surroundings(time.time, time.monotonic, secrets.token_hex(8), os.urandom, _mounts())
    yield from examine(directory, around)


def _mounts() -> str:
    try:
        return _MOUNTS.read_text(errors="surrogateescape")
    except OSError:
        return ""


@contextmanager
def _unwinding() -> Iterator[None]:
    """Let a signal end the command through its ``finally`` blocks, once: cleaning up is not interrupted."""
    before = {number: signal.getsignal(number) for number in _ENDING}
    caught = [number for number, handler in before.items() if handler is not signal.SIG_IGN]

    def leave(number: int, frame: FrameType | None) -> None:
        for each in caught:
            signal.signal(each, signal.SIG_IGN)
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        sys.exit(128 + number)

    for number in caught:
        signal.signal(number, leave)
    try:
        yield
    finally:
        for number in caught:
            signal.signal(number, before[number])


def _text(findings: Sequence[CheckResult], style: Style) -> str:
    wide = max(len(each.subject) for each in findings)
    paint = {Severity.OK: style.good, Severity.NOTE: style.warn, Severity.PROBLEM: style.bad}
    lines = []
    for finding in findings:
        mark = paint[finding.level](finding.level.value) + " " * (len("problem") - len(finding.level.value))
        indent = " " * (len("problem") + 2 + wide + 2)
        said = [finding.text, *finding.details]
        if finding.kind is not None:
            said.append(f"see: unbroken explain {finding.kind}")
        wrapped = list(_wrapped(said, _WIDTH - len(indent)))
        lines.append(f"{mark}  {finding.subject:<{wide}}  {wrapped[0]}".rstrip())
        lines += [f"{indent}{line}" for line in wrapped[1:]]
    return "\n".join([*lines, "", _summary(findings)])


def _wrapped(sentences: Iterable[str], width: int) -> Iterator[str]:
    for sentence in sentences:
        # A path or a message of others is broken at spaces only, so that it can be copied.
        text = printable(sentence)
        yield from textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False) or [""]


def _summary(findings: Sequence[CheckResult]) -> str:
    problems, notes = (sum(each.level is level for each in findings) for level in (Severity.PROBLEM, Severity.NOTE))
    if not problems and not notes:
        return "no problems"
    counted = [amounts.plural(problems, "problem") if problems else "no problems"]
    return ", ".join(counted + ([amounts.plural(notes, "note")] if notes else []))
