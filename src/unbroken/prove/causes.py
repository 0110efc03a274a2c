"""Why two uninterrupted runs of one script may differ: what its text and its surroundings suggest, likeliest first.

A suggestion, never a verdict: the script is read as text, not understood. Pure.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

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
_EARLY: Final = "they differ from the first step on: a seed is set too late, or not for every generator"
_HASHED: Final = re.compile(r"(?<![\w.])hash\s*\(|\bset\s*\(|frozenset\s*\(")


def likely_causes(text: str, environ: Mapping[str, str], *, first_step: int | None) -> tuple[str, ...]:
    """What to look at first; ``text`` is the script's, empty where it could not be found."""
    found = list(_suspicions(text, environ)) if text else []
    early = [_EARLY] if first_step is not None and first_step <= 1 and _SEEDED.search(text) else []
    return (*early, *(found or _in_general()))


def _suspicions(text: str, environ: Mapping[str, str]) -> Iterator[str]:
    if not _SEEDED.search(text):
        yield "no seed: call torch.manual_seed(...) before the model is made"
    if _NUMPY.search(text) and not _NUMPY_SEED.search(text):
        yield "numpy's generator has no seed: call numpy.random.seed(...)"
    if _PYTHON.search(text) and not _PYTHON_SEED.search(text):
        yield "python's generator has no seed: call random.seed(...)"
    if _DEFAULT_RNG.search(text):
        yield "a generator is made without a seed: default_rng(SEED), Random(SEED)"
    if _BENCHMARK.search(text):
        yield "cudnn.benchmark = True chooses kernels by the clock: set it to False"
    if _WORKERS.search(text) and not _WORKER_SEED.search(text):
        yield "DataLoader workers: give the loader generator=torch.Generator().manual_seed(...), or num_workers=0"
    if _CLOCK.search(text):
        yield "the clock, or the system's randomness, is read: nothing that trains may depend on it"
    if _HASHED.search(text) and environ.get("PYTHONHASHSEED", "random") == "random":
        yield "the order of sets and hash() differ from process to process: sort, or set PYTHONHASHSEED=0"
    if not _DETERMINISTIC.search(text):
        yield "no torch.use_deterministic_algorithms(True): call unbroken.exact.pin() before the first computation"
    if _TF32.search(text):
        yield "TF32 is allowed: it repeats its bits on one kind of GPU, and not between kinds"


def _in_general() -> Iterator[str]:
    yield "seeds: torch.manual_seed, numpy.random.seed and random.seed, before anything is made"
    yield "kernels: unbroken.exact.pin() sets use_deterministic_algorithms, cudnn.benchmark and cuBLAS's workspace"
    yield "DataLoader workers without generator= or worker_init_fn="
    yield "the clock, uuid or the system's randomness; the order of sets (PYTHONHASHSEED=0)"


def script_text(words: Sequence[str], cwd: Path) -> str:
    """The text of the first Python file that a command names; empty where there is none."""
    for word in words:
        path = cwd / word
        if word.endswith(".py") and path.is_file():
            return path.read_text(errors="replace")
    return ""
