"""Test a trainer in one line: killed and resumed, it must give the same bits as uninterrupted.

    def train(directory):                          # at the top of a module
        with unbroken.Run(directory, model=model, optimizer=optimizer, data=loader) as run:
            for step in run.steps(20):
                ...

    def test_my_trainer_survives_kills(tmp_path):
        assert_exact(train, tmp_path)              # or: kills=[7, "manifest"], stops=[12], ranks=[2, 1, 3]

Every job is one process per rank; kills are SIGKILLs. The trainer is not changed: a drill makes its ``Run`` end where
the test says.
"""

import functools
import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, ParamSpec

from unbroken.files import LOCAL
from unbroken.quoting import amounts
from unbroken.records.drill import ENVIRONMENT, PHASES, Drill, Fault, write_drill
from unbroken.records.journal import read_history
from unbroken.records.layout import Layout
from unbroken.store.directory import Store
from unbroken.store.scan import newest_first, read_quietly, scan
from unbroken.testing.exactness import Comparison, compare_runs
from unbroken.testing.worlds import DEFAULT_TIMEOUT_S, Ended, Ranks, logs, start

UNDISTURBED: Final = "undisturbed"
INTERRUPTED: Final = "interrupted"
_AGAIN: Final = "undisturbed-again"
_SAVES: Final = 6
# A rank whose peer was killed fails at once; otherwise it is not waited for.
_PEERS_WAIT_S: Final = 10.0
_POLL_S: Final = 0.02

_Parameters = ParamSpec("_Parameters")
Train = Callable[..., object]
"""A trainer: given a run's directory, it starts or resumes the run."""


@dataclass(frozen=True)
class Interruption:
    """How one job of the chain is ended: killed at a step's edge or in a phase of a save, or stopped at a step."""

    kill: int | str | None = None
    stop: int | None = None

    def __str__(self) -> str:
        if self.stop is not None:
            return f"stopped at step {amounts.count(self.stop)}"
        if isinstance(self.kill, int):
            return f"killed at step {amounts.count(self.kill)}"
        return f"killed in a save's phase {self.kill}" if self.kill else "left alone to the end"

    def drill(self, save_steps: int | None, resumed: int) -> Drill:
        """The drill that ends a job this way; the job resumes from step ``resumed``."""
        if self.stop is not None:
            return Drill(save_steps=save_steps, stop_at=self.stop)
        if isinstance(self.kill, int):
            # Edges are counted from the job's first one, the same on every rank.
            return Drill(save_steps=save_steps, faults=(Fault("edge", "kill", max(1, self.kill - resumed), rank=None),))
        faults = (Fault(self.kill, "kill"),) if self.kill is not None else ()
        return Drill(save_steps=save_steps, faults=faults)


@dataclass
class Exactness:
    """The result: the jobs as text, and the comparison of the two runs.

    Attributes:
        undisturbed: the run of the uninterrupted job.
        interrupted: the run of the interrupted jobs.
        jobs: one line about each interrupted job.
        comparison: of the two runs.
        resumed_steps: the step that each later job resumed from.
        is_deterministic: whether two uninterrupted jobs are equal.
    """

    undisturbed: Path
    interrupted: Path
    jobs: list[str] = field(default_factory=list)
    comparison: Comparison | None = None
    resumed_steps: tuple[int, ...] = ()
    is_deterministic: bool = True

    @property
    def is_exact(self) -> bool:
        """Whether the interrupted run equals the uninterrupted one, and was really resumed."""
        return self.comparison is not None and self.comparison.is_equal and self.is_tried

    @property
    def is_tried(self) -> bool:
        """Whether a job resumed from a checkpoint; starting over is not a resume."""
        last = self.comparison.ends[0] if self.comparison is not None else None
        return last is not None and any(0 < step < last for step in self.resumed_steps)

    def lines(self) -> list[str]:
        """The result as text."""
        said = [f"job {number}: {words}" for number, words in enumerate(self.jobs, start=1)]
        said += self.comparison.lines("the run left alone", "the chain") if self.comparison else []
        if not self.is_tried:
            said.append("no job resumed from a checkpoint, so nothing was tested: save more often, or end jobs later")
        if not self.is_deterministic:
            said.append(
                "a second uninterrupted run differs too: the trainer is not deterministic, so look at its "
                "seeds and at torch.use_deterministic_algorithms before you look at its resume"
            )
        return said

    def __str__(self) -> str:
        return "\n".join(self.lines())


def check_exact(
    train: Train,
    directory: Path | str,
    *args: object,
    kills: Sequence[int | str] | None = None,
    stops: Sequence[int] = (),
    ranks: int | Sequence[int] = 1,
    save_steps: int | None = None,
    ignore: Sequence[str] = (),
    timeout_seconds: float = DEFAULT_TIMEOUT_S,
) -> Exactness:
    """Like ``assert_exact``, but returns the result instead of asserting. The arguments are the same.

    Raises:
        AssertionError: a job did not end as planned.
        ValueError: the directory is not empty, a phase is unknown, or a number of ranks is below 1.
        TypeError: the trainer cannot be imported by another process.
    """
    root = Path(directory)
    sizes = (ranks,) if isinstance(ranks, int) else tuple(ranks)
    _require_usable(train, root, sizes, kills or ())
    trial = _Trial(train, args, root, timeout_seconds)
    steps = trial.left_alone(UNDISTURBED, sizes[0])
    asked = kills if kills is not None else () if stops else _usual(steps)
    endings = [*(Interruption(kill=kill) for kill in asked), *(Interruption(stop=stop) for stop in stops)]
    cadence = save_steps or max(1, steps // _SAVES)
    found = Exactness(root / UNDISTURBED, root / INTERRUPTED)
    is_usual = kills is None and not stops and cadence < steps
    for number, ending in enumerate(_in_turn(endings, found.interrupted, is_usual=is_usual)):
        found.jobs.append(trial.interrupted(number, ending, sizes[number % len(sizes)], cadence))
    resumes = read_history(Layout(found.interrupted)).of_kind("resume")
    found.resumed_steps = tuple(int(event.number("step") or 0) for event in resumes)
    found.comparison = compare_runs(found.undisturbed, found.interrupted, ignore=ignore)
    if not found.comparison.is_equal:
        # Only if they differ: a trainer that is not deterministic cannot be resumed exactly.
        trial.left_alone(_AGAIN, sizes[0])
        found.is_deterministic = compare_runs(found.undisturbed, root / _AGAIN, ignore=ignore).is_equal
    return found


def _called_like(
    model: Callable[_Parameters, Exactness],
) -> Callable[[Callable[..., Exactness]], Callable[_Parameters, Exactness]]:
    """Give a function the signature of another, for documentation, editors and type checkers."""
    return functools.wraps(model, assigned=(), updated=())


@_called_like(check_exact)
def assert_exact(*args: Any, **kwargs: Any) -> Exactness:  # noqa: ANN401, D417 -- those of check_exact
    """Assert that a trainer gives the same bits when it is killed and resumed as without interruption.

    Args:
        train: a function at the top of a module, called as ``train(run_directory, *args)`` on every rank of every job.
            With more than one rank the process group (gloo) is made before.
        directory: an empty directory, such as pytest's ``tmp_path``.
        args: further arguments of the trainer.
        kills: where jobs are killed, one after the other: a number is a step, a string is a phase of a save (``parts``,
            ``manifest``, ``rename``, ``latest``, ...; see ``unbroken.records.drill.PHASES``). By default a step at a
            third of the steps, a save, and a step at two thirds; and the first commit, if there is no checkpoint yet.
        stops: steps at which further jobs get a stop request.
        ranks: the number of ranks; of several numbers, jobs take one after the other, the uninterrupted run the first.
        save_steps: steps between two checkpoints of the interrupted run; by default a sixth of the steps. Saves run in
            the background, so a kill may lose the last one; it is complete when the next one has started.
        ignore: metrics that need not be equal, besides the measured ones.
        timeout_seconds: a job that takes longer is killed, and the assertion fails; by default 120, or
            ``UNBROKEN_TEST_TIMEOUT_S``.

    Returns:
        The jobs and the comparison.

    Raises:
        AssertionError: the runs differ; or a job did not end as planned, with the end of its log.
        ValueError: the directory is not empty, a phase is unknown, or a number of ranks is none.
        TypeError: the trainer cannot be found by another process.
    """
    found = check_exact(*args, **kwargs)
    if not found.is_exact:
        raise AssertionError(f"not exact\n{found}")
    return found


def _usual(steps: int) -> tuple[int | str, ...]:
    return (max(1, steps // 3), "manifest", max(1, 2 * steps // 3))


def _in_turn(endings: Sequence[Interruption], run: Path, *, is_usual: bool) -> Iterator[Interruption]:
    """The jobs of a chain, each decided when the previous one has ended; the last is uninterrupted.

    A fast trainer may be killed before its first commit: then it is killed once more right after that commit, or the
    last job would start over and test nothing.
    """
    yield from endings
    if is_usual and not _newest_step(run):
        yield Interruption(kill="committed")
    yield Interruption()


def _require_usable(train: Train, root: Path, sizes: Sequence[int], kills: Sequence[int | str]) -> None:
    if root.exists() and (not root.is_dir() or any((root / name).exists() for name in (UNDISTURBED, INTERRUPTED))):
        raise ValueError(f"{root} is not empty; give every check a directory of its own")
    if not sizes or min(sizes) < 1:
        raise ValueError(f"ranks must be 1 or more, are {list(sizes)}")
    unknown = [kill for kill in kills if isinstance(kill, str) and kill not in PHASES]
    if unknown:
        raise ValueError(f"a save has no phase {unknown[0]!r}; it has {', '.join(PHASES)}")
    try:
        pickle.dumps(train)
    except (pickle.PicklingError, AttributeError, TypeError) as refused:
        raise TypeError(
            f"{train!r} cannot be imported by another process: use a function at the top level of a module"
        ) from refused


@dataclass
class _Trial:
    train: Train
    args: tuple[object, ...]
    root: Path
    timeout_seconds: float

    def left_alone(self, name: str, size: int) -> int:
        """An uninterrupted run; returns its last step."""
        ended = self._job(self.root / name, size, None)
        if not all(each.is_good for each in ended):
            raise AssertionError(f"without interruption, the trainer failed\n{logs(ended)}")
        step = _newest_step(self.root / name)
        if not step:
            raise AssertionError(f"without interruption, the trainer saved no checkpoint in {self.root / name}")
        return step

    def interrupted(self, number: int, ending: Interruption, size: int, save_steps: int) -> str:
        """One job of the chain; returns its description."""
        run = self.root / INTERRUPTED
        resumed = _newest_step(run)
        LOCAL.make_directory(self.root)
        path = self.root / f"drill-{number + 1}.json"
        write_drill(path, ending.drill(save_steps, resumed))
        ended = self._job(run, size, path)
        on = f"on {amounts.plural(size, 'rank')}, from step {amounts.count(resumed)}, {ending}"
        is_killed = any(each.exit_code < 0 and not each.is_late for each in ended)
        is_as_planned = is_killed if ending.kill is not None else all(each.is_good for each in ended)
        if not is_as_planned:
            was = "ended by itself" if all(each.is_good for each in ended) else "did not end well"
            raise AssertionError(f"job {number + 1}, {on}: it {was}\n{logs(ended)}")
        return on

    def _job(self, run: Path, size: int, drill: Path | None) -> list[Ended]:
        env = {} if drill is None else {ENVIRONMENT: str(drill.absolute())}
        with start(size, self.train, str(run), *self.args, env=env, is_plain=size == 1) as ranks:
            return _waited(ranks, self.timeout_seconds)


def _waited(ranks: Ranks, timeout_seconds: float) -> list[Ended]:
    """Wait for all ranks; after one was killed, only briefly for the others."""
    ends_at = time.monotonic() + timeout_seconds
    while not ranks.is_over() and time.monotonic() < ends_at:
        if ranks.is_any_killed():
            ends_at = min(ends_at, time.monotonic() + _PEERS_WAIT_S)
        time.sleep(_POLL_S)
    return ranks.wait(0.0)


def _newest_step(run: Path) -> int:
    """The step a job will resume from."""
    store = Store(Layout(run).checkpoints)
    for name in newest_first(store, scan(store).committed):
        manifest = read_quietly(store, name)
        if manifest is not None:
            return manifest.step
    return 0
