"""The uninterrupted run that all chains are compared with, made twice to check that the script is deterministic.

The second one saves often, as the chains do, so that the two also show whether saving changes anything.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from unbroken.errors import BaselineFails, NotDeterministic, NothingToProve
from unbroken.prove.job_process import JobEnd, JobProcess
from unbroken.prove.proof_setup import LOG_LINES, ProofSetup
from unbroken.quoting import amounts
from unbroken.quoting.shell import shell_line
from unbroken.records.drill import Drill
from unbroken.records.journal import Event, read_history
from unbroken.records.layout import Layout
from unbroken.store.directory import Store
from unbroken.store.scan import read_quietly, scan
from unbroken.testing.exactness import Comparison, compare_runs

# ---- why two runs may differ ----

_SEEDED: Final = re.compile(r"manual_seed\s*\(|seed_everything\s*\(|set_seed\s*\(")
_DETERMINISTIC: Final = re.compile(r"use_deterministic_algorithms\s*\(\s*True|exact\.pin\s*\(")
_BENCHMARK: Final = re.compile(r"cudnn\.benchmark\s*=\s*True")
_TF32: Final = re.compile(r"allow_tf32\s*=\s*True|set_float32_matmul_precision\s*\(\s*['\"](?:high|medium)")
_WORKERS: Final = re.compile(r"num_workers\s*=\s*(?!0\b)")
_WORKER_SEED: Final = re.compile(r"worker_init_fn|generator\s*=")
_NUMPY: Final = re.compile(r"\b(?:np|numpy)\.random\.(?!seed|default_rng|Generator|RandomState)\w+\s*\(")
_NUMPY_SEED: Final = re.compile(r"\b(?:np|numpy)\.random\.seed\s*\(")
_PYTHON: Final = re.compile(r"(?<![\w.])random\.(?!seed|Random)\w+\s*\(")
_PYTHON_SEED: Final = re.compile(r"(?<![\w.])random\.seed\s*\(")
_DEFAULT_RNG: Final = re.compile(r"default_rng\s*\(\s*\)|(?<![\w.])Random\s*\(\s*\)")
_CLOCK: Final = re.compile(r"\btime\.(?:time|time_ns|monotonic)\s*\(|datetime\.now\s*\(|urandom|uuid4|secrets\.")
_EARLY: Final = "they differ from the first step on: a seed is set too late, or not for every RNG"
_HASHED: Final = re.compile(r"(?<![\w.])hash\s*\(|\bset\s*\(|frozenset\s*\(")


def likely_causes(text: str, environ: Mapping[str, str], *, first_step: int | None) -> tuple[str, ...]:
    """Likely causes of a difference; ``text`` is the script, empty if it was not found."""
    found = list(_suspicions(text, environ)) if text else []
    early = [_EARLY] if first_step is not None and first_step <= 1 and _SEEDED.search(text) else []
    return (*early, *(found or _in_general()))


def _suspicions(text: str, environ: Mapping[str, str]) -> Iterator[str]:
    if not _SEEDED.search(text):
        yield "no seed: call torch.manual_seed(...) before the model is created"
    if _NUMPY.search(text) and not _NUMPY_SEED.search(text):
        yield "numpy is not seeded: call numpy.random.seed(...)"
    if _PYTHON.search(text) and not _PYTHON_SEED.search(text):
        yield "python's random is not seeded: call random.seed(...)"
    if _DEFAULT_RNG.search(text):
        yield "an RNG is created without a seed: use default_rng(SEED), Random(SEED)"
    if _BENCHMARK.search(text):
        yield "cudnn.benchmark = True chooses kernels by timing: set it to False"
    if _WORKERS.search(text) and not _WORKER_SEED.search(text):
        yield "DataLoader workers: give the loader generator=torch.Generator().manual_seed(...), or num_workers=0"
    if _CLOCK.search(text):
        yield "the script reads the clock or system randomness: training must not depend on it"
    if _HASHED.search(text) and environ.get("PYTHONHASHSEED", "random") == "random":
        yield "the order of sets and hash() differ from process to process: sort, or set PYTHONHASHSEED=0"
    if not _DETERMINISTIC.search(text):
        yield "no torch.use_deterministic_algorithms(True): call unbroken.exact.pin() before the first computation"
    if _TF32.search(text):
        yield "TF32 is allowed: its bits repeat on one GPU model only"


def _in_general() -> Iterator[str]:
    yield "seeds: call torch.manual_seed, numpy.random.seed and random.seed first"
    yield "kernels: unbroken.exact.pin() sets use_deterministic_algorithms, cudnn.benchmark and cuBLAS's workspace"
    yield "DataLoader workers without generator= or worker_init_fn="
    yield "the clock, uuid or system randomness; the order of sets (PYTHONHASHSEED=0)"


def script_text(words: Sequence[str], cwd: Path) -> str:
    """The text of the first Python file that a command names; empty where there is none."""
    for word in words:
        path = cwd / word
        if word.endswith(".py") and path.is_file():
            return path.read_text(errors="replace")
    return ""


# ---- the uninterrupted run ----

FEWEST_STEPS: Final = 4
_SAVES: Final = 12
_MOST_DIFFERENCES: Final = 6


@dataclass(frozen=True)
class Baseline:
    """The uninterrupted run: its steps and time, and from them the save interval of chains.

    ``ranks`` is its actual number of processes; ``checkpoint_bytes`` the size of one checkpoint; ``idle`` are the RNGs
    that differ from one such run to the next because they are neither seeded nor used.
    """

    run: Path
    steps: int
    seconds: float
    step_s: float
    ranks: int
    checkpoint_bytes: int
    idle: tuple[str, ...] = ()

    @property
    def save_steps(self) -> int:
        """The save interval of chains."""
        return max(1, self.steps // _SAVES)


def run_alone(setup: ProofSetup, name: str, *, save_steps: int | None, ranks: int | None) -> Baseline:
    """Run the command to its end without interruption.

    Raises:
        NothingToProve: it has no run, several runs, too few steps, or does not complete.
        BaselineFails: it fails without any fault.
        StorageFailed: the folder could not be written.
    """
    run = setup.run(name)
    with setup.start(run, Drill(save_steps=save_steps), ranks) as job:
        ended = setup.wait(job)
    _require_completed(setup, job, ended, run)
    history = read_history(Layout(run))
    start, end = history.last("job-start"), history.last("job-end")
    steps = (end.whole("step") if end else None) or 0
    sizes = _sizes(run)
    if steps < FEWEST_STEPS or not sizes:
        said = f"its run has {amounts.plural(steps, 'step')}" if sizes else "its run ends before the first save"
        raise NothingToProve(
            command=_shown(setup), reason=said, remedy=f"let it train {FEWEST_STEPS} steps or more", log=()
        )
    took_s = _seconds_between(start, end)
    ranks_seen = (start.whole("world_size") if start else None) or 1
    return Baseline(run, steps, took_s, took_s / steps, ranks_seen, max(sizes))


def _require_completed(setup: ProofSetup, job: JobProcess, ended: JobEnd | None, run: Path) -> None:
    log = job.said(LOG_LINES)
    if ended is None:
        limit = amounts.duration(setup.limit_s)
        reason = f"the uninterrupted run did not end within {limit}"
        remedy = "let it train fewer steps, or give it more time with --minutes"
        raise NothingToProve(command=_shown(setup), reason=reason, remedy=remedy, log=log)
    jobs = read_history(Layout(run)).jobs
    outcome = ended.outcome
    if ended.code and (outcome is None or outcome.status != "stopped"):
        how = f"exit code {ended.code}" + (f", {outcome.reason}" if outcome and outcome.reason else "")
        raise BaselineFails(command=_shown(setup), how=how, log=log)
    if outcome is None:
        reason = "the command never entered an unbroken.Run"
        remedy = "put the training loop into `with unbroken.Run(...)`; see docs/run.md"
        raise NothingToProve(command=_shown(setup), reason=reason, remedy=remedy, log=log)
    if len(jobs) > 1:
        reason = f"the command entered {len(jobs)} runs; only one can be proven at a time"
        remedy = "prove a command that enters one of them"
        raise NothingToProve(command=_shown(setup), reason=reason, remedy=remedy, log=())
    if outcome.status != "completed":
        at = f" at step {amounts.count(outcome.step)}" if outcome.step is not None else ""
        saved = "" if _sizes(run) else ", before the first save"
        reason = f"the run ended{at}{saved} before its target: {outcome.reason}"
        remedy = "`run.steps(N)` must reach its end without interruption"
        raise NothingToProve(command=_shown(setup), reason=reason, remedy=remedy, log=log)


def require_same(setup: ProofSetup, first: Baseline, second: Baseline) -> Comparison:
    """Raise unless two uninterrupted runs are equal, bit for bit; returns the comparison.

    Raises:
        NotDeterministic: they differ.
        UnbrokenError: one of them cannot be read.
    """
    found = compare_runs(first.run, second.run)
    if found.is_equal:
        return found
    step = found.first.step if found.first else None
    causes = likely_causes(script_text(setup.command.words, setup.cwd), setup.environ, first_step=step)
    said = tuple(found.lines())[:_MOST_DIFFERENCES]
    raise NotDeterministic(command=_shown(setup), differences=said, causes=causes)


def _sizes(run: Path) -> list[int]:
    store = Store(Layout(run).checkpoints)
    found = [read_quietly(store, name) for name in scan(store).committed]
    return [manifest.size_bytes for manifest in found if manifest is not None]


def _seconds_between(start: Event | None, end: Event | None) -> float:
    if start is None or end is None or start.at_s is None or end.at_s is None:
        return 0.0
    return max(0.0, end.at_s - start.at_s)


def _shown(setup: ProofSetup) -> str:
    return shell_line(setup.command.given)
