"""Every benchmark that needs a GPU, one after the other, and one table: one GPU, under eight minutes.

    python -m bench.gpu [--only defaults stall ...] [--show]

Each runs as its own command and writes its own file in ``bench/results``; the table is made of these files, so that
``--show`` prints it again without a GPU. ``--device cpu`` runs small sizes of those that can, to try the command,
and keeps nothing.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from bench.measure import RESULTS
from unbroken.report.style import Style
from unbroken.report.table import Column, table

Facts = Mapping[str, Any]
Row = tuple[str, str, str, str, str]
COMMANDS: dict[str, list[str]] = {
    "defaults": ["--steps", "150", "--save-steps", "60"],
    "payload": ["--device", "cuda", "--gigabytes", "6", "--files", "8"],
    "stall": ["--steps", "20"],
    "fingerprint": ["--repeats", "3"],
    "gpt": ["--size", "small", "--rounds", "3"],
}
_TINY = ["--width", "256", "--layers", "2", "--batch", "8"]
ON_CPU: dict[str, list[str]] = {
    "defaults": ["--device", "cpu", "--steps", "12", "--save-steps", "4", *_TINY],
    "payload": ["--device", "cpu", "--gigabytes", "0.07", "--repeats", "1", "--files", "2"],
    "stall": ["--device", "cpu", "--steps", "8", "--repeats", "1", *_TINY],
}


def rows_of_defaults(facts: Facts) -> Iterator[Row]:
    """Saves and resumes by a user's loop, beside the disk."""
    commits, limit = facts["full"]["commits"], facts["limit"]
    write = max(value for name, value in limit.items() if name.startswith("write"))
    read = max(value for name, value in limit.items() if name.startswith("read"))
    size_bytes, pauses = facts["full"]["bytes"], [commit["paused_s"] for commit in commits]
    yield "pause, first save, s", f"{pauses[0]:.3f}", "", "", ""
    yield "pause, later saves, s", f"{max(pauses[1:], default=pauses[0]):.3f}", "", "", "the longest"
    rate = statistics.median(commit["bytes"] / commit["seconds"] / 1e9 for commit in commits)
    yield "durable, GB/s", f"{rate:.2f}", f"{write:.2f}", f"{rate / write:.2f}", "the disk"
    rate = size_bytes / facts["resumed"]["opened_s"] / 1e9
    yield "resume, verified, GB/s", f"{rate:.2f}", f"{read:.2f}", f"{rate / read:.2f}", "the disk"
    rate = size_bytes / facts["verify_s"] / 1e9
    yield "verify --full, GB/s", f"{rate:.2f}", f"{read:.2f}", f"{rate / read:.2f}", "the disk"


def rows_of_payload(facts: Facts) -> Iterator[Row]:
    """Saving and loading tensors, beside stock distributed checkpoints at their best."""
    median = {name: each["median_s"] for name, each in facts["figures"].items()}
    for what in ("save", "load"):
        ours = min(value for name, value in median.items() if name.startswith(f"{what}, unbroken"))
        stock = min(value for name, value in median.items() if name.startswith(f"{what}, stock"))
        yield f"{what}, s", f"{ours:.2f}", f"{stock:.2f}", f"{ours / stock:.2f}", f"dcp.{what}"


def rows_of_stall(facts: Facts) -> Iterator[Row]:
    """What a save adds to the time of a loop."""
    median = {name: each["median_s"] for name, each in facts["figures"].items()}
    ours = median["unbroken, copies beside the next step"] - median["no save"]
    for name in ("dcp.save", "dcp.async_save"):
        stock = next(value for what, value in median.items() if what.startswith(f"stock {name},")) - median["no save"]
        yield "a save adds to the loop, s", f"{ours:.3f}", f"{stock:.3f}", f"{ours / stock:.3f}", name


def rows_of_fingerprint(facts: Facts) -> Iterator[Row]:
    """Fingerprints beside one read of the same bytes."""
    median = {name: each["median"] for name, each in facts["figures"].items()}
    device = "cuda" if "cuda, plain sum" in median else "cpu"
    limit = median[f"{device}, plain sum"]
    for name, value in median.items():
        if name.startswith(device) and name.endswith("fingerprint"):
            kind = name.removeprefix(f"{device} ").removesuffix(", fingerprint")
            yield f"fingerprint, {kind}, GB/s", f"{value:.0f}", f"{limit:.0f}", f"{value / limit:.2f}", "a plain sum"


def rows_of_gpt(facts: Facts) -> Iterator[Row]:
    """Training in exact mode beside the fastest that need not repeat."""
    for size in ("small", "large"):
        speeds = {name: each["tokens_per_s"] for name, each in facts.get(size, {}).items()}
        ours = max((value for name, value in speeds.items() if name.startswith("ours, exact")), default=None)
        others = {name: value for name, value in speeds.items() if not name.startswith("ours, exact")}
        if ours is not None and others:
            best = max(others, key=lambda name: others[name])
            yield f"{size}, exact, tokens/s", f"{ours:,}", f"{others[best]:,}", f"{ours / others[best]:.2f}", best


ROWS: dict[str, Callable[[Facts], Iterator[Row]]] = {
    "defaults": rows_of_defaults,
    "payload": rows_of_payload,
    "stall": rows_of_stall,
    "fingerprint": rows_of_fingerprint,
    "gpt": rows_of_gpt,
}
HEADINGS = ("benchmark", "what", "unbroken", "beside", "ratio", "which is")


def kept(name: str, device: str, results: Path = RESULTS) -> Facts | None:
    """The last results of one benchmark."""
    path = results / (f"{name}.json" if name in ("fingerprint", "gpt") else f"{name}-{device}.json")
    found: Facts | None = json.loads(path.read_text()) if path.exists() else None
    return found


def whole_table(device: str, names: list[str], results: Path = RESULTS) -> str:
    """One table of what is kept."""
    rows = []
    for name in names:
        if (facts := kept(name, device, results)) is not None:
            rows += [(name, *row) for row in ROWS[name](facts)]
    columns = [Column(heading, heading in ("unbroken", "beside", "ratio")) for heading in HEADINGS]
    return table(columns, rows, style=Style(False))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--only", nargs="+", choices=list(COMMANDS), metavar="NAME")
    parser.add_argument("--show", action="store_true", help="only the table of what is kept")
    options = parser.parse_args()
    commands = COMMANDS if options.device == "cuda" else ON_CPU
    names = [name for name in commands if options.only is None or name in options.only]
    with tempfile.TemporaryDirectory() as trial:
        results = RESULTS if options.device == "cuda" else Path(trial)
        began, failed = time.monotonic(), () if options.show else run_all(names, commands, results)
        print(whole_table(options.device, [name for name in names if name not in failed], results))
    if not options.show:
        print(f"{time.monotonic() - began:.0f} s in all" + (f"; failed: {', '.join(failed)}" if failed else ""))
    if failed:
        sys.exit(1)


def run_all(names: list[str], commands: Mapping[str, list[str]], results: Path) -> tuple[str, ...]:
    """Run them one after the other; returns those that failed."""
    failed = []
    for name in names:
        began = time.monotonic()
        # What it prints goes to the terminal: a benchmark of minutes should be seen to work.
        command = [sys.executable, "-m", f"bench.{name}", *commands[name]]
        done = subprocess.run(command, check=False, env={**os.environ, "BENCH_RESULTS": str(results)})
        failed += [name] if done.returncode else []
        print(f"bench.{name}: exit code {done.returncode}, {time.monotonic() - began:.0f} s", flush=True)
    return tuple(failed)


if __name__ == "__main__":
    main()
