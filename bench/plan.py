"""Plans: how full sequences get, how long building and looking up take, and memory at a thousand million documents.

python -m bench.plan                                   # fill, build and lookup; results/plan.json
python -m bench.plan build 1000000000 --cache DIR      # so many synthetic documents: time, memory
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench.measure import Samples, interleaved, write_results
from unbroken.data.order.epoch_order import BucketOrder, Growth
from unbroken.data.packing.bucket_plan import BucketPlan, open_plan
from unbroken.report.style import Style
from unbroken.report.table import Column, table

PERIOD = 1 << 16
BLOCK = 1024


@dataclass(frozen=True)
class Endless:
    """A shard and its index in one: web-like lengths that repeat, so that any range of offsets is at hand."""

    entries: int
    median: int

    def __post_init__(self) -> None:
        drawn = np.random.default_rng(7).lognormal(np.log(self.median), 1.1, PERIOD)
        lengths = np.clip(drawn, 4, 200_000).astype(np.int64) + 1
        object.__setattr__(self, "_ends", np.concatenate([[0], np.cumsum(lengths)]))

    @property
    def tokens(self) -> int:
        return int(self.offsets(self.entries, self.entries)[0])

    @property
    def index_digest(self) -> str:
        return f"endless-{self.entries}-{self.median}"

    @property
    def idx_path(self) -> Path:
        return Path("endless.idx")

    def offsets(self, first: int, last: int) -> NDArray[np.int64]:
        ends: NDArray[np.int64] = self.__dict__["_ends"]
        rounds, place = np.divmod(np.arange(first, last + 1), PERIOD)
        offsets: NDArray[np.int64] = rounds * ends[-1] + ends[place]
        return offsets

    def prefixes(self, first: int, last: int) -> NDArray[np.uint16]:
        return np.zeros(last - first, np.uint16)


def opened(shard: Endless, cache: Path, *, max_length: int = 2048, overlap: int = 256) -> BucketPlan:
    return open_plan(
        [shard], max_length=max_length, overlap=overlap, packing=True, cache=cache, index_of=lambda _path: shard
    )


def peak_bytes() -> int:
    """The most memory this program held; what its parent held does not count, as it would in ``getrusage``."""
    line = next(each for each in Path("/proc/self/status").read_text().splitlines() if each.startswith("VmHWM"))
    return int(line.split()[1]) << 10


def serve(plan: BucketPlan, blocks: int) -> float:
    """Look up blocks of samples that follow each other, here and there in an epoch; microseconds for a sample."""
    order = BucketOrder([plan.sequences], [Growth(0, 0)], key=1)
    starts = np.linspace(0, plan.total_sequences - BLOCK, blocks).astype(np.int64).tolist()
    spent = 0.0
    for start in starts:
        look_up(plan, order, start)  # what is mapped for the first time is not what is measured
        begin = time.process_time()
        look_up(plan, order, start)
        spent += time.process_time() - begin
    return spent / (blocks * BLOCK) * 1e6


def look_up(plan: BucketPlan, order: BucketOrder, start: int) -> None:
    group, sequence = order.locate(np.arange(start, start + BLOCK))
    for each in np.unique(group).tolist():
        plan.windows_of(each, sequence[group == each])


def build(documents: int, cache: Path) -> dict[str, object]:
    begin = time.process_time()
    plan = opened(Endless(documents, median=60), cache)
    facts: dict[str, object] = {
        "documents": documents,
        "groups": plan.groups,
        "sequences": plan.total_sequences,
        "fill": float(plan.fill),
        "build_cpu_s": time.process_time() - begin,
        "peak_bytes": peak_bytes(),
        "lookup_us": serve(plan, 20),
    }
    return {**facts, "peak_with_serving_bytes": peak_bytes()}


def timed(act: Callable[[Path], object]) -> float:
    with tempfile.TemporaryDirectory() as cache:
        begin = time.process_time()
        act(Path(cache))
        return time.process_time() - begin


def measured(repeats: int) -> dict[str, object]:
    facts: dict[str, object] = {}
    rows = []
    for documents, median in ((20_000, 500), (200_000, 500), (1_000_000, 500), (1_000_000, 60)):
        shard = Endless(documents, median)
        name = f"{documents:,} documents of {median} tokens"
        cpu = interleaved({name: lambda s=shard: timed(lambda cache: opened(s, cache))}, repeats)[name]  # type: ignore[misc]
        with tempfile.TemporaryDirectory() as cache:
            plan = opened(shard, Path(cache))
            lookup = Samples(tuple(serve(plan, 10) for _ in range(repeats)))
        rows.append((name, f"{float(plan.fill):.3%}", f"{cpu.median:.2f}", cpu.spread, f"{lookup.median:.2f}"))
        facts[name] = {"fill": float(plan.fill), "build_cpu_s": cpu.values, "lookup_us": lookup.values}
    columns = [Column("corpus"), Column("fill", True), Column("build CPU s", True), Column("spread")]
    print(table([*columns, Column("lookup us", True)], rows, style=Style(False)))
    return facts


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    commands = parser.add_subparsers(dest="command")
    building = commands.add_parser("build")
    building.add_argument("documents", type=int)
    building.add_argument("--cache", type=Path, required=True)
    building.add_argument("--record", help="keep the figures in results/ under this name")
    options = parser.parse_args()
    if options.command == "build":
        facts = build(options.documents, options.cache)
        print(json.dumps(facts))
        if options.record:
            write_results(options.record, facts)
    else:
        write_results("plan", measured(options.repeats))


if __name__ == "__main__":
    main()
