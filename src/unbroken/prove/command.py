"""The command of a user, made to write its run elsewhere and to train on another number of ranks.

Where the command has the words ``{run}`` or ``{ranks}`` they are replaced. A drill sends the run elsewhere in any
case; ``unbroken train`` is also told by its config. Without ``{ranks}`` the option of ``unbroken run``,
``unbroken train`` and ``torchrun`` is set.
"""

import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

RUN: Final = "{run}"
RANKS: Final = "{ranks}"
_PROCESSES: Final = ("--nproc-per-node", "--nproc_per_node")
_PYTHON: Final = "python"


@dataclass(frozen=True)
class Command:
    """A training command as it was given.

    Attributes:
        given: the words as the user wrote them.
        words: the program that is started, and its arguments.
        program: ``train``, ``run`` or ``torchrun`` where it is one of those, else empty.
        head: how many words name the program; options of it stand behind them.
    """

    given: tuple[str, ...]
    words: tuple[str, ...]
    program: str = ""
    head: int = 1

    @property
    def is_startable(self) -> bool:
        """Whether its program is there."""
        return shutil.which(self.words[0]) is not None

    @property
    def sets_ranks(self) -> bool:
        """Whether the number of ranks can be set in it."""
        return bool(self.program) or self._has(RANKS)

    @property
    def ranks(self) -> int | None:
        """How many processes it asks for by itself; None where that is not said by a number."""
        for at, word in enumerate(self.words):
            name, _, value = word.partition("=")
            if name in _PROCESSES:
                value = value or (self.words[at + 1] if at + 1 < len(self.words) else "")
                return int(value) if value.isdecimal() else None
        return 1 if self.program in ("train", "run") else None

    def _has(self, mark: str) -> bool:
        return any(mark in word for word in self.words)

    def words_for(self, run: Path, ranks: int | None) -> list[str]:
        """The command of one job; ``ranks`` is None where the number is not ours to set."""
        words = list(self.words)
        if ranks is not None and not self._has(RANKS) and ranks != self.ranks:
            words = [*words[: self.head], _PROCESSES[0], str(ranks), *_without(words[self.head :], _PROCESSES)]
        words = [word.replace(RUN, str(run)).replace(RANKS, str(ranks or self.ranks or 1)) for word in words]
        if self.program == "train" and not self._has(RUN):
            words.append(f"training.output_dir={run}")
        return words


def understood(words: Sequence[str], *, python: str = sys.executable) -> Command:
    """A command line, with the programs known that this house has a way with.

    ``unbroken`` is the one that is running, whatever stands first on the path.
    """
    given, started = tuple(words), tuple(words)
    if Path(given[0]).name == "unbroken":
        started = (python, "-m", "unbroken", *given[1:])
    first = Path(started[0]).name
    if first == "torchrun":
        return Command(given, started, "torchrun")
    is_module = first.startswith(_PYTHON) and started[1:2] == ("-m",)
    if is_module and started[2:3] == ("torch.distributed.run",):
        return Command(given, started, "torchrun", head=3)
    if is_module and started[2:3] == ("unbroken",) and started[3:4] in (("train",), ("run",)):
        return Command(given, started, started[3], head=4)
    return Command(given, started)


def _without(words: Sequence[str], options: Sequence[str]) -> list[str]:
    """The words without some options that take a value; what stands behind ``--`` or the script is left alone."""
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
