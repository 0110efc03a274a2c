"""What the ranks of a run send each other for one save, and what rank 0 computes alone.

    python -m bench.messages [RANKS] [TENSORS]

Counts what is passed to gloo in every exchange of a save (packed messages, tensors that are reduced); what gloo adds
on the wire is left out. First in real worlds of 2 and 4 ranks that train and save twice, so that no exchange is missed:
the first save makes the plan, the second finds it unchanged. Then for a large world without its processes: the same
messages are built and packed for tensors that are sharded over all ranks (FSDP) or whole on every rank (DDP). Rank 0
makes the plan for all of them, describes what all have reported (index and ``.metadata``, at the first save and at one
with the same plan) and encodes the manifest; what a rank decodes when it resumes is decoded. The message that grows, a
report of what a rank wrote, is built in both ways for the real worlds, to compare the sizes. Writes
``bench/results/messages.json``.
"""

import collections
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import unbroken
from bench.measure import write_results
from bench.plan import peak_bytes
from unbroken.loop.edge import StepEdges
from unbroken.state import payload, save
from unbroken.state.description import Describer
from unbroken.state.index import Box
from unbroken.state.index import decode as decode_index
from unbroken.state.pieces import Held, Holding, SavePlan, agree_on, assign, part_name, spread_over
from unbroken.state.planners import Piece
from unbroken.state.stage import StagedPiece
from unbroken.state.trainer_state import rank_part
from unbroken.store import manifest as manifest_format
from unbroken.store.commit import Draft, begin
from unbroken.store.directory import Store
from unbroken.store.manifest import Manifest, Part, Tensor
from unbroken.store.names import PERIODIC
from unbroken.testing.worlds import logs, spawn
from unbroken.world import Link, packed

LAYERS = 40
ELEMENTS = 4


class Counted:
    """Bytes that this process gives to gloo and gets from it, by kind of exchange."""

    def __init__(self) -> None:
        self.sent: collections.Counter[str] = collections.Counter()
        self.received: collections.Counter[str] = collections.Counter()

    def clear(self) -> None:
        self.sent.clear()
        self.received.clear()

    def found(self) -> dict[str, Any]:
        sent, received = dict(self.sent), dict(self.received)
        return {
            "sent_bytes": sum(sent.values()),
            "received_bytes": sum(received.values()),
            "sent_by_exchange": sent,
            "received_by_exchange": received,
        }

    def install(self) -> None:
        """Count what goes through every link of this process."""
        others = dist.get_world_size() - 1
        is_root = dist.get_rank() == 0
        # By name: how often the tensor of a call is sent by this rank, and how often one like it is received.
        shares = {
            "all_gather": (1, others),
            "gather": (0, others) if is_root else (1, 0),
            # gloo passes it on by a tree: rank 0 sends it to a few, the others receive it once.
            "broadcast": (1, 0) if is_root else (0, 1),
            "send": (1, 0),
            "receive": (0, 1),
            "_start_reduce": (1, 1),
        }
        for name, share in shares.items():
            setattr(Link, name, self._counting(name.strip("_"), getattr(Link, name), *share))

    def _counting(self, name: str, real: Any, sent: int, received: int) -> Any:  # noqa: ANN401 - a method of Link
        def call(link: Link, tensor: torch.Tensor, *args: Any, **options: Any) -> Any:  # noqa: ANN401
            self.sent[name] += sent * tensor.nbytes
            self.received[name] += received * tensor.nbytes
            return real(link, tensor, *args, **options)

        return call


# ---- real worlds ----


def two_saves(wrap: str, directory: str) -> list[dict[str, Any]]:
    """What each of two saves exchanges, the votes at the steps' edges left out; on every rank."""
    counted, found = Counted(), list[dict[str, Any]]()
    counted.install()
    real = StepEdges._save

    def counting(edges: StepEdges, kind: str, **options: Any) -> None:  # noqa: ANN401 - as the edge calls it
        edges.votes.drain()
        counted.clear()
        real(edges, kind, **options)
        edges.opened.saver.wait()
        found.append(counted.found())

    StepEdges._save = counting  # type: ignore[method-assign, assignment]
    torch.manual_seed(1)
    model: Any = nn.Sequential(*(nn.Linear(16, 16) for _ in range(LAYERS)))
    if wrap == "fsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    else:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters())
    settings = unbroken.Settings(save_steps=1, console=False, audit="off")
    reports: list[tuple[int, int]] = []
    write = save.Saver._write

    def writing(saver: save.Saver, work: Any, draft: Draft) -> Any:  # noqa: ANN401 - of the saver's own
        report = write(saver, work, draft)
        reports.append(_report_bytes(draft, saver._world.rank, work.plan.pieces, report))
        return report

    save.Saver._write = writing  # type: ignore[method-assign, assignment]
    with unbroken.Run(directory, settings=settings, model=model, optimizer=optimizer) as run:
        for _ in run.steps(2):
            optimizer.zero_grad()
            model(torch.ones(2, 16)).sum().backward()
            optimizer.step()
    return [{**each, **_compared(report)} for each, report in zip(found, reports, strict=True)]


def _report_bytes(draft: Draft, rank: int, pieces: Sequence[Piece], report: Any) -> tuple[int, int]:  # noqa: ANN401
    """The packed report of a rank as it was sent, and as it is built here for the same pieces."""
    with tempfile.TemporaryDirectory() as directory:
        built = _report(Path(directory), rank, pieces)
    return packed((report, None)).numel(), packed((built, None)).numel()


def _compared(sizes: tuple[int, int]) -> dict[str, int]:
    return {"report_sent_bytes": sizes[0], "report_built_bytes": sizes[1]}


def _report(directory: Path, rank: int, pieces: Sequence[Piece]) -> save._RankReport:
    """What a rank reports that wrote these pieces, really written, with elements of zero."""
    draft = begin(Store(directory), step=1, job="j0001_ab12cd34")
    staged = [StagedPiece(each, (torch.zeros(each.size_bytes, dtype=torch.uint8),)) for each in pieces]
    written = payload.write_bundles([staged] if staged else [], draft, rank)
    record = draft.write_part(f"ranks/{rank:05}.json", [b"{}"])
    return save._RankReport(payload.WriteReport.of(written, pieces), record, 0.0)


# ---- a large world, without its processes ----


def held_by_rank(rank: int, ranks: int, names: Sequence[str], *, is_sharded: bool) -> Holding:
    """What a rank holds of many tensors: a row of each, or all of each."""
    rows = (rank, 1) if is_sharded else (0, ranks)
    box = Box((rows[0], 0), (rows[1], ELEMENTS))
    return Holding.of([Held(name, "float32", (ranks, ELEMENTS), (box,), name) for name in names])


def _names(tensors: int) -> list[str]:
    """Names as long as those of a large model and the state of its AdamW."""
    kinds = ("model.", "optimizer.state.exp_avg.", "optimizer.state.exp_avg_sq.", "optimizer.state.step.")
    parts = ("attention.query_key_value.weight", "attention.output.weight", "mlp.up.weight", "mlp.down.weight")
    found = [f"{kind}transformer.layers.{layer}.{part}" for layer in range(tensors) for part in parts for kind in kinds]
    return found[:tensors]


def simulate(ranks: int, tensors: int, *, is_sharded: bool) -> dict[str, Any]:
    """Every message of a save in a world of so many ranks: built, packed and measured."""
    names = _names(tensors)
    # The gathered lists of the ranks are alike but for numbers; rank 0 holds all of them.
    held = [held_by_rank(rank, ranks, names, is_sharded=is_sharded) for rank in range(ranks)]
    sent_held = [packed(held[rank]).numel() for rank in (1, ranks - 1)]
    # One thread computes, so that CPU time is what it takes on a machine that does nothing else.
    began = time.process_time()
    spreads = spread_over(held)
    planned = agree_on(spreads)
    assigned = assign(held, spreads, planned)
    by_rank = [one.pieces(names, chosen) for one, chosen in zip(held, assigned, strict=True)]
    plan_s = time.process_time() - began
    numbers = packed(assigned[-1]).numel()
    broadcast = packed(((planned, 1 << 40), None)).numel()
    with tempfile.TemporaryDirectory() as directory:
        last = _report(Path(directory), ranks - 1, by_rank[-1])
        report = packed((last, None)).numel()
    sums = tensors * 16
    digest = 2 * 16 * 2
    items = 8
    # Counters, capture, counting, copies begun: one number each; two comparisons of digests and one of the items'; the
    # vote on the plan; the names' digest and the prints of the rank's own RNG states; sums before and after the copy.
    small = 4 * 8 + 2 * digest + items * 32 + 4 + 8
    prints = packed((("0" * 32, {f"ranks.{ranks - 1}.generators.{n}": "0" * 32 for n in range(3)}, {}), None)).numel()
    each_save = {"report": report + 8, "sums": 2 * sums, "prints": prints, "small": small}
    first_save = {"held": max(sent_held) + 8}
    return {
        "ranks": ranks,
        "tensors": tensors,
        "is_sharded": is_sharded,
        "pieces_of_a_rank": len(by_rank[-1]),
        "sent_by_a_rank_each_save": {**each_save, "total": sum(each_save.values())},
        "sent_by_a_rank_at_the_first_save_beside_it": {**first_save, "total": sum(first_save.values())},
        "received_by_a_rank_at_the_first_save_beside_it": {"plan": broadcast, "own_pieces": numbers + 8},
        "received_by_rank_0_each_save": (ranks - 1) * (report + 8 + prints) + 2 * sums + small,
        "received_by_rank_0_at_the_first_save_beside_it": (ranks - 1) * first_save["held"],
        "received_by_another_rank_each_save": (ranks - 1) * prints + 2 * sums + small,
        "rank_0_makes_the_plan_cpu_s": round(plan_s, 1),
        **describe(SavePlan(0, planned, tuple(by_rank), (), 1 << 40), last.tensors),
    }


def describe(plan: SavePlan, last: payload.WriteReport) -> dict[str, Any]:
    """What rank 0 does with the reports of all ranks, and what a resume reads of it, in seconds of one CPU."""
    reports = [_report_like(last, rank, plan) for rank in range(len(plan.pieces_by_rank))]
    describer, seconds = Describer(), dict[str, float]()
    with tempfile.TemporaryDirectory() as directory:
        for step, name in enumerate(("first_save", "same_plan"), start=1):
            draft = begin(Store(Path(directory)), step=step, job="j0001_ab12cd34")
            began = time.process_time()
            described = describer.write(plan, reports, draft)
            seconds[f"rank_0_describes_cpu_s_{name}"] = round(time.process_time() - began, 2)
        index = (draft.path / payload.INDEX_PART).read_bytes()
    parts = [*(part for report in reports for part in report.parts), *described]
    began = time.process_time()
    decode_index(index, {part.name: part.size_bytes for part in parts})
    seconds["index_decode_cpu_s"] = round(time.process_time() - began, 2)
    records = [Part(rank_part(rank), described[0].digest) for rank in range(len(reports))]
    tensors = {name: Tensor(one.dtype, one.shape, "0" * 32) for name, one in plan.tensors.items()}
    manifest = Manifest("a", 1, PERIODIC, 1, "j", "unbroken", (*parts, *records), tensors)
    began = time.process_time()
    encoded = manifest_format.encode(manifest)
    seconds["manifest_encode_cpu_s"] = round(time.process_time() - began, 3)
    began = time.process_time()
    manifest_format.decode(encoded, Path("manifest.json"))
    seconds["manifest_decode_cpu_s"] = round(time.process_time() - began, 3)
    sizes = {"index_bytes": described[0].size_bytes, "metadata_bytes": described[1].size_bytes}
    kept = {"rank_0_keeps_between_saves_bytes": describer.kept_bytes}
    return {**seconds, **sizes, **kept, "manifest_bytes": len(encoded), "peak_memory_bytes": peak_bytes()}


def _report_like(last: payload.WriteReport, rank: int, plan: SavePlan) -> payload.WriteReport:
    """The report of another rank. Sharded alike, all ranks write the same layout; otherwise each is really written."""
    if len(plan.pieces_by_rank[rank]) == len(plan.tensors):
        return payload.WriteReport(tuple(Part(part_name(rank, 0), part.digest) for part in last.parts), last.layout)
    with tempfile.TemporaryDirectory() as directory:
        return _report(Path(directory), rank, plan.pieces_by_rank[rank]).tensors


def main() -> None:
    ranks = int(sys.argv[1]) if len(sys.argv) > 1 else 512
    tensors = int(sys.argv[2]) if len(sys.argv) > 2 else 10_000
    real = []
    for wrap in ("fsdp", "ddp"):
        for size in (2, 4):
            with tempfile.TemporaryDirectory() as directory:
                ended = spawn(size, two_saves, wrap, f"{directory}/run", timeout_seconds=240)
            if not all(each.is_good for each in ended):
                raise RuntimeError(logs(ended))
            for number, name in enumerate(("first save", "second save")):
                by_rank = [each.value[number] for each in ended]
                real.append({"wrap": wrap, "ranks": size, "save": name, "rank_0": by_rank[0], "last_rank": by_rank[-1]})
                print(json.dumps(real[-1]))
    large = []
    for is_sharded in (True, False):
        large.append(simulate(ranks, tensors, is_sharded=is_sharded))
        print(json.dumps(large[-1]))
    print(write_results("messages", {"real_worlds": real, "large_worlds": large, "layers": LAYERS}))


if __name__ == "__main__":
    main()
