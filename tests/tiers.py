"""Which tests are quick and which are deep, and what each directory may cost: the rules behind `tiers.toml`.

Every test is in exactly one tier, but for those of hypothesis, which are in both: with a part of their examples in the
quick one, with all of them in the deep one.
"""

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

TIERS = ("quick", "deep")
TABLE = Path(__file__).with_name("tiers.toml")


# A busy neighbour makes the same tests take up to 1.7 times as many CPU seconds: caches and cores are shared. Budgets
# are 1.15 times what was measured on a quiet machine, so a run over this many times its budget costs more, whatever the
# neighbours do.
FAILS_OVER = 1.7
# What CI may take, on two cores: however the directories share it, a run in which none fails takes no more.
CI_CPU_S = 50 * 60 * 2
# What `make test` should take on two quiet cores: the budgets of the quick tier add up to no more.
QUICK_CPU_S = 10 * 60 * 2
# The processes from which worlds and tools are forked: what they take to import serves whichever test comes first.
SERVERS = "fork servers"


@dataclass(frozen=True)
class Excess:
    """What is to be said of a directory that is over its budget, and whether the run fails for it."""

    said: str
    fails: bool


@dataclass(frozen=True)
class Tiers:
    """The table.

    Attributes:
        deep: pattern of a file below tests/ or of `file::test`, and how many parametrizations of each test that
            matches stay in the quick tier. The last pattern that matches counts.
        budget_s: for each tier, the CPU seconds that a directory may take.
    """

    deep: Mapping[str, int]
    budget_s: Mapping[str, Mapping[str, float]]

    def kept(self, file: str, test: str) -> int | None:
        """How many parametrizations of a test stay in the quick tier; None if all do.

        Args:
            file: its path below tests/.
            test: its name, without parameters and with its class, if any: `TestStore::test_it`.
        """
        found = [count for pattern, count in self.deep.items() if matches(pattern, file, test)]
        return found[-1] if found else None


def read_tiers(path: Path = TABLE) -> Tiers:
    """The table as it is in the repository."""
    found = tomllib.loads(path.read_text(encoding="utf-8"))
    return Tiers(found["deep"], found["budget_s"])


def matches(pattern: str, file: str, test: str) -> bool:
    """Whether a pattern of the table is about a test."""
    file_pattern, _, test_pattern = pattern.partition("::")
    return fnmatchcase(file, file_pattern) and fnmatchcase(test, test_pattern or "*")


def spread(count: int, kept: int) -> set[int]:
    """The places of those that are kept among so many, spread evenly from the first on."""
    return {place * count // kept for place in range(min(kept, count))} if kept < count else set(range(count))


def directory(file: str) -> str:
    """The directory whose budget a test file counts for: two levels in unit/, one elsewhere."""
    folders = file.split("/")[:-1]
    return "/".join(folders[: 2 if folders[:1] == ["unit"] else 1]) or "."


def quick(tiers: Tiers, tests: Sequence[tuple[str, str]]) -> list[bool]:
    """For each test, given by file and name in the order of the run, whether it is in the quick tier."""
    places: dict[tuple[str, str], list[int]] = {}
    for place, test in enumerate(tests):
        places.setdefault(test, []).append(place)
    chosen: set[int] = set()
    for test, found in places.items():
        kept = tiers.kept(*test)
        chosen |= set(found) if kept is None else {found[place] for place in spread(len(found), kept)}
    return [place in chosen for place in range(len(tests))]


def over_budget(tiers: Tiers, tier: str, spent_s: Iterable[tuple[str, float]]) -> list[Excess]:
    """What is to be said of every directory that took more than its budget, or has none."""
    budgets, found = tiers.budget_s[tier], []
    for name, seconds in spent_s:
        budget = budgets.get(name)
        took = f"{name if name == SERVERS else f'tests/{name}'} took {seconds:.0f} CPU seconds"
        if budget is None:
            found.append(Excess(f"{took} and has no budget in tests/tiers.toml", fails=True))
        elif seconds > budget:
            fails_at = FAILS_OVER * budget
            said = f"{took}; its budget in the {tier} tier is {budget:.0f}, and a run fails over {fails_at:.0f}"
            found.append(Excess(said, fails=seconds > fails_at))
    return found
