"""The user's training command, rewritten for another run directory and another number of ranks.

``{run}`` and ``{ranks}`` in the command are replaced. The drill redirects the run in any case; for ``unbroken train``
the config is overridden as well. Without ``{ranks}`` the option of ``unbroken run``, ``unbroken train`` or ``torchrun``
is set.
"""

import shutil
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from unbroken.config import Config
from unbroken.config.changes import compare, with_values
from unbroken.config.reading import from_json
from unbroken.errors import BadUsage
from unbroken.files import LOCAL
from unbroken.records.journal import History, read_history
from unbroken.records.layout import Layout

RUN: Final = "{run}"
RANKS: Final = "{ranks}"
_PROCESSES: Final = ("--nproc-per-node", "--nproc_per_node")
_PYTHON: Final = "python"


@dataclass(frozen=True)
class DrilledCommand:
    """A training command.

    Attributes:
        given: the words as the user wrote them.
        words: the program that is started, and its arguments.
        program: ``train``, ``run`` or ``torchrun`` where it is one of those, else empty.
        head: the number of words that name the program; its options follow.
    """

    given: tuple[str, ...]
    words: tuple[str, ...]
    program: str = ""
    head: int = 1

    @property
    def is_startable(self) -> bool:
        """Whether its program exists."""
        return shutil.which(self.words[0]) is not None

    @property
    def sets_ranks(self) -> bool:
        """Whether the number of ranks can be set in it."""
        return bool(self.program) or self._has(RANKS)

    @property
    def ranks(self) -> int | None:
        """The number of processes in the command; None if it is not given as a number."""
        for at, word in enumerate(self.words):
            name, _, value = word.partition("=")
            if name in _PROCESSES:
                value = value or (self.words[at + 1] if at + 1 < len(self.words) else "")
                return int(value) if value.isdecimal() else None
        return 1 if self.program in ("train", "run") else None

    def _has(self, mark: str) -> bool:
        return any(mark in word for word in self.words)

    def words_for(self, run: Path, ranks: int | None) -> list[str]:
        """The command of one job; ``ranks`` is None if the number cannot be set."""
        words = list(self.words)
        if ranks is not None and not self._has(RANKS) and ranks != self.ranks:
            words = [*words[: self.head], _PROCESSES[0], str(ranks), *_without(words[self.head :], _PROCESSES)]
        words = [word.replace(RUN, str(run)).replace(RANKS, str(ranks or self.ranks or 1)) for word in words]
        if self.program == "train" and not self._has(RUN):
            words.append(f"training.output_dir={run}")
        return words


def understood(words: Sequence[str], *, python: str = sys.executable) -> DrilledCommand:
    """Parse a command line and recognise its program.

    ``unbroken`` is the one that is running, whatever is first on the path.
    """
    given, started = tuple(words), tuple(words)
    if Path(given[0]).name == "unbroken":
        started = (python, "-m", "unbroken", *given[1:])
    first = Path(started[0]).name
    if first == "torchrun":
        return DrilledCommand(given, started, "torchrun")
    is_module = first.startswith(_PYTHON) and started[1:2] == ("-m",)
    if is_module and started[2:3] == ("torch.distributed.run",):
        return DrilledCommand(given, started, "torchrun", head=3)
    if is_module and started[2:3] == ("unbroken",) and started[3:4] in (("train",), ("run",)):
        return DrilledCommand(given, started, started[3], head=4)
    return DrilledCommand(given, started)


def _without(words: Sequence[str], options: Sequence[str]) -> list[str]:
    """The words without some options that take a value; anything after ``--`` or the script is kept."""
    kept: list[str] = []
    waiting = iter(words)
    for word in waiting:
        name, is_assigned, _ = word.partition("=")
        if name in options:
            if not is_assigned:
                next(waiting, None)
            continue
        kept.append(word)
        if word == "--" or word.endswith(".py"):
            break
    return [*kept, *waiting]


# ---- the command that made a run ----

PROGRAM: Final = "unbroken replay"
_LIMIT_BYTES: Final = 1 << 20


@dataclass(frozen=True)
class Relocation:
    """The paths of a recomputation: its output directory, and its data if that was moved."""

    output_dir: Path
    data_path: Path | None = None

    def changes(self) -> dict[str, Any]:
        """The config fields for them."""
        changed: dict[str, Any] = {"training.output_dir": str(self.output_dir), "training.resume": "auto"}
        return changed if self.data_path is None else {**changed, "data.path": str(self.data_path)}


def recorded_config(layout: Layout) -> Config | None:
    """The config that started a run; None if no ``unbroken train`` did.

    Raises:
        RunRecordDamaged: the record is damaged, or was changed after it was written.
        StorageFailed: an I/O error.
    """
    if LOCAL.find(layout.config) is None:
        return None
    text = LOCAL.read_bytes(layout.config, limit_bytes=_LIMIT_BYTES).decode("utf-8", "replace")
    return from_json(text, str(layout.config)).config


def config_of_jobs(layout: Layout, started: Config, jobs: Iterable[int]) -> Config:
    """The config of these jobs, in all fields that bits depend on.

    Raises:
        BadUsage: the jobs had different configs, so no single recomputation can reproduce them.
        StorageFailed: an I/O error.
    """
    history = read_history(layout)
    by_job = {job: with_values(started, _changes(history, job)) for job in sorted(set(jobs))}
    if not by_job:
        return started
    (first, config), *others = by_job.items()
    for job, other in others:
        found = compare(config, other)
        if differing := [each.field for each in (*found.fixed, *found.declared)]:
            complaint = (
                f"jobs {first} and {job} of {layout.run} differ in {' and '.join(differing)}; "
                "choose A and B where it did not change"
            )
            raise BadUsage(command=PROGRAM, complaint=complaint)
        config = other
    return config


def _changes(history: History, job: int) -> dict[str, Any]:
    """The differences of a job's config to the run's record, by field."""
    event = history.last("config", job=job)
    changes = event.values.get("changes") if event is not None else None
    if not isinstance(changes, dict) or event is None or event.values.get("is_replaced"):
        return {}
    return {name: pair[1] for name, pair in changes.items() if isinstance(pair, list) and len(pair) == 2}
