"""How much CPU time the tool takes to start: median of many, beside an interpreter that does nothing.

    python -m bench.startup [REPEATS]

Prints a table and writes bench/results/startup.json. CPU time, not wall time: a busy machine does not change it much.
"""

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from unbroken.report.style import Style
from unbroken.report.table import Column, table
from unbroken.version import VERSION

RESULTS = Path(__file__).resolve().parent / "results" / "startup.json"
TOOL = str(Path(sys.executable).parent / "unbroken")
BARE = "python -c pass"
RUN = "run"
CHECKPOINTS = 10
# What a command may cost on the machine the design was measured on; a bar to look at, not a test.
BARS_MS = {"unbroken --version": 80.0, "unbroken status RUN --json": 150.0}


def commands() -> dict[str, list[str]]:
    """What is measured, by the name it is shown under."""
    return {
        BARE: [sys.executable, "-c", "pass"],
        "python -c 'import click'": [sys.executable, "-c", "import click"],
        "unbroken --version": [TOOL, "--version"],
        "unbroken --help": [TOOL, "--help"],
        "unbroken explain torn-checkpoint --json": [TOOL, "explain", "torn-checkpoint", "--json"],
        "unbroken completion bash": [TOOL, "completion", "bash"],
        "unbroken status RUN --json": [TOOL, "status", RUN, "--json"],
        "unbroken ls RUN --json": [TOOL, "ls", RUN, "--json"],
    }


def cpu_ms(command: list[str], folder: str) -> float:
    """User and system time of one run, as the kernel counts it for the child alone."""
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
    return (used.ru_utime + used.ru_stime) * 1000


def make_run(folder: Path) -> None:
    """A run with a few small checkpoints."""
    for step in range(1, CHECKPOINTS + 1):
        checkpoint = folder / RUN / "checkpoints" / f"checkpoint-{step}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "model.pt").write_bytes(bytes(1000))
    subprocess.run([TOOL, "seal", "--all", str(folder / RUN / "checkpoints")], check=True, stdout=subprocess.DEVNULL)


def measure(repeats: int) -> dict[str, list[float]]:
    """Each command in turn, over and over, so that a slow minute hits them all alike."""
    samples: dict[str, list[float]] = {name: [] for name in commands()}
    with tempfile.TemporaryDirectory() as folder:
        make_run(Path(folder))
        for command in commands().values():
            cpu_ms(command, folder)
        for _ in range(repeats):
            for name, command in commands().items():
                samples[name].append(cpu_ms(command, folder))
    return samples


def main() -> None:
    repeats = int(sys.argv[1]) if len(sys.argv) > 1 else 21
    samples = measure(repeats)
    bare = statistics.median(samples[BARE])
    facts: dict[str, dict[str, float | None]] = {}
    for name, taken in samples.items():
        low, median, high = statistics.quantiles(taken, n=4)
        facts[name] = {
            "median_ms": round(median, 1),
            "lower_quartile_ms": round(low, 1),
            "upper_quartile_ms": round(high, 1),
            "times_bare": round(median / bare, 2),
            "bar_ms": BARS_MS.get(name),
        }
    columns = [Column("command"), *(Column(h, is_number=True) for h in ("median ms", "quartiles", "x bare", "bar ms"))]
    rows = [
        (
            name,
            f"{fact['median_ms']}",
            f"{fact['lower_quartile_ms']} to {fact['upper_quartile_ms']}",
            f"{fact['times_bare']}",
            f"{fact['bar_ms'] or ''}",
        )
        for name, fact in facts.items()
    ]
    print(table(columns, rows, style=Style(color=False)))
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    document = {
        "schema": "unbroken.bench.startup/1",
        "version": VERSION,
        "python": platform.python_version(),
        "repeats": repeats,
        "commands": facts,
    }
    RESULTS.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
