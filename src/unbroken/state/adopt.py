"""One ordinary checkpoint from the emergency dumps of all ranks.

Each dump is read by a rank that sees it, all checksums verified. What the ranks of an ordinary save exchange (which
values they share, which tensors are one tensor, who holds which box) is computed from the records in their dumps. The
result is committed into the run's store like any save, so that resuming, resharding, verifying and keeping need no case
for emergencies. Until that commit nothing has changed; a damaged dump costs only the attempt.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from unbroken.errors import DamagedCheckpoint, ManifestDamaged, StorageFailed
from unbroken.files import Files
from unbroken.state import payload
from unbroken.state.capture import RNG, differing_names, own_prefix
from unbroken.state.cursor import Cursor
from unbroken.state.description import finish
from unbroken.state.dump import RECORD_PART, Sums, View, filled_boxes, read_view
from unbroken.state.encode import Json, decode, encode
from unbroken.state.fingerprint import box_sums, combine, print_of
from unbroken.state.index import DTYPES, Box, Chunk, Index, TensorEntry
from unbroken.state.items import Item, ObjectItem
from unbroken.state.payload import Location, Written
from unbroken.state.pieces import Held, Holding, Planned, SavePlan, agree_on, bytes_of, spread_over
from unbroken.state.planners import Piece
from unbroken.state.read import read
from unbroken.state.trainer_state import TRAINER_STATE, TrainerState, encode_rank, rank_part
from unbroken.store.commit import Draft, Record, begin, commit
from unbroken.store.directory import Store
from unbroken.store.dumps import METADATA, Dump, DumpSet
from unbroken.store.fields import Malformed
from unbroken.store.manifest import Manifest, Part, Tensor
from unbroken.store.names import SHUTDOWN, machine_of
from unbroken.store.parts import read_part
from unbroken.world import World


@dataclass(frozen=True)
class AdoptTarget:
    """The store to commit into, and the job that does it; ``fence`` as for every commit."""

    store: Store
    job: str
    number: int
    at_ns: int
    fence: Callable[[], None] | None = None


@dataclass(frozen=True)
class _Source:
    """One dump that this rank brings in."""

    store: Store
    name: str
    manifest: Manifest
    view: View


@dataclass(frozen=True)
class _Merged:
    """What the dumps say together: a plan as an ordinary save makes it, and the values."""

    plan: SavePlan
    places: Mapping[tuple[str, Box], Location]
    renamed: Mapping[int, Mapping[str, str]]
    shared: Mapping[str, Json]
    ranked: Sequence[Mapping[str, Json]]

    def parts_of(self, rank: int) -> set[str]:
        """The parts of one rank's dump that are needed."""
        return {self.places[piece.name, piece.box].part for piece in self.plan.pieces_by_rank[rank]}


def adopt(
    dump_set: DumpSet,
    copies: Mapping[int, Sequence[tuple[int, Dump]]],
    items: Sequence[Item],
    world: World,
    into: AdoptTarget,
) -> str:
    """Make one checkpoint of the dumps of all ranks and commit it; returns its name. Collective.

    Args:
        dump_set: the step, job and world of the dumps.
        copies: for each rank of that world, who of this job can read which copy of its dump, the best first.
        items: the items of this run, for a loader's account.
        world: the ranks of this job.
        into: the run's store.

    Raises:
        DamagedCheckpoint: a dump is not what was written, in all its copies.
        ManifestDamaged: a dump's record is none.
        TensorUnsupported: the dumps do not fit together.
        StorageFailed: I/O error.
        RankFailed: one of these, on another rank.
    """
    files = into.store.files
    found = world.gather_or_none(lambda: _open_mine(copies, world.rank, files))
    views = {view.rank: view for theirs in found for view in theirs}
    merged = world.all_or_none(lambda: _fitting([views[rank] for rank in range(dump_set.world_size)], items))
    draft_name = world.from_first(lambda: begin(into.store, step=dump_set.step, job=into.job).name)
    draft = Draft(into.store, draft_name)
    try:
        reports = world.gather_to_first(lambda: _bring_in(merged, copies, draft, world.rank))
        return world.from_first(lambda: _commit(dump_set, merged, views[0], reports, copies, draft, into))
    except BaseException:
        if world.is_first:
            into.store.files.remove_tree(draft.path)
        raise


def _reader(copies: Sequence[tuple[int, Dump]]) -> int:
    """The rank that reads a dump: the one that sees its best copy."""
    return copies[0][0]


def _open_mine(copies: Mapping[int, Sequence[tuple[int, Dump]]], me: int, files: Files) -> list[View]:
    return [_open(found, me, files).view for found in copies.values() if _reader(found) == me]


def _open(copies: Sequence[tuple[int, Dump]], me: int, files: Files) -> _Source:
    """The first copy that this rank sees and whose record is whole."""
    refused: DamagedCheckpoint | ManifestDamaged | StorageFailed | None = None
    for _, dump in (each for each in copies if each[0] == me):
        try:
            store = dump.store(files)
            manifest = store.read_manifest(dump.name)
            return _Source(store, dump.name, manifest, read_view(store, dump.name, manifest))
        except (DamagedCheckpoint, ManifestDamaged, StorageFailed) as wrong:
            refused = refused or wrong
    assert refused is not None
    raise refused


# ---- merging the records ----


def _fitting(views: Sequence[View], items: Sequence[Item]) -> _Merged:
    try:
        return _merge(views, items)
    except (KeyError, ValueError, TypeError, Malformed) as wrong:
        complaint = f"the records of the ranks do not fit together: {type(wrong).__name__}: {wrong}"
        raise ManifestDamaged(path=Path(RECORD_PART), complaint=complaint) from wrong


def _merge(views: Sequence[View], items: Sequence[Item]) -> _Merged:
    """The comparison that live ranks make by exchanging digests, made between their records."""
    first = views[0]
    differing = differing_names(first.digests, [view.digests for view in views])
    uneven = differing_names(first.copies, [view.copies for view in views])
    renamed = {view.rank: _new_names(view, differing, uneven) for view in views}
    held = [[_renamed(one, renamed[view.rank]) for one in view.held] for view in views]
    planned = agree_on(spread_over([Holding.of(mine) for mine in held]))
    places, pieces = _first_holders(views, held, renamed, planned)
    shared: dict[str, Json] = {n: v for n, v in first.values.items() if n != RNG and n not in differing}
    ranked: list[dict[str, Json]] = [{name: _own_value(view, name) for name in sorted(differing)} for view in views]
    if first.shares_rng:
        shared[RNG] = first.values[RNG]
    else:
        for mine, view in zip(ranked, views, strict=True):
            mine[RNG] = view.values[RNG]
    plan = SavePlan(0, planned, pieces, (), bytes_of(planned))
    return _Merged(plan, places, renamed, _settled(shared, views, items), ranked)


def _new_names(view: View, differing: set[str], uneven: set[str]) -> dict[str, str]:
    """Names that only this rank uses, for what it has otherwise than the others; as an ordinary save gives them."""
    names: dict[str, str] = {}
    for name in differing & view.own_values.keys():
        names |= {old: new for old, new in view.own_values[name][1].items() if old != new}
    if view.rank:
        names |= {name: own_prefix(view.rank, name) for name in uneven}
    return names


def _own_value(view: View, name: str) -> Json:
    return view.own_values[name][0] if name in view.own_values else view.values[name]


def _renamed(one: Held, names: Mapping[str, str]) -> Held:
    return one._replace(name=names.get(one.name, one.name), same_as=names.get(one.same_as, one.same_as))


def _first_holders(
    views: Sequence[View],
    held: Sequence[Sequence[Held]],
    renamed: Mapping[int, Mapping[str, str]],
    planned: Mapping[str, Planned],
) -> tuple[dict[tuple[str, Box], Location], tuple[tuple[Piece, ...], ...]]:
    """Where each piece is taken from: the first rank that holds it, so that as few files as possible are brought in."""
    taken: dict[tuple[str, Box], Location] = {}
    pieces: list[tuple[Piece, ...]] = []
    for view, theirs in zip(views, held, strict=True):
        names = renamed[view.rank]
        places = {(names.get(name, name), box): place for (name, box), place in view.places.items()}
        mine = []
        for one in theirs:
            for box in filled_boxes(one) if planned[one.name].same_as == one.name else ():
                if (one.name, box) not in taken:
                    # One tensor under two names here that is two on another rank lies under the first of them.
                    taken[one.name, box] = places.get((one.name, box)) or places[one.same_as, box]
                    mine.append(Piece(one.name, one.dtype, box))
        pieces.append(tuple(mine))
    return taken, tuple(pieces)


def _settled(shared: dict[str, Json], views: Sequence[View], items: Sequence[Item]) -> dict[str, Json]:
    """Add to the loader's account the samples that each rank had served and not yet reported."""
    shares = [view.share for view in views if view.share is not None]
    for item in items if shares else ():
        if isinstance(item, ObjectItem) and isinstance(item.stateful, Cursor) and item.name in shared:
            loader = item.stateful.positioned
            state = decode(shared[item.name], item=item.name, give_tensor=_no_tensor, allow_pickle=False)
            if loader is None or not isinstance(state, dict):
                continue
            kept = {**state["state"], "loader": loader.settled_state(state["state"]["loader"], shares)}
            shared[item.name] = encode(
                {"state": kept}, item=item.name, path=item.name, take_tensor=_take_no_tensor, allow_pickle=False
            )
    return shared


def _no_tensor(name: Json) -> torch.Tensor:
    raise ValueError(f"a loader with one position for all ranks names a tensor: {name!r}")


def _take_no_tensor(path: str, tensor: torch.Tensor) -> Json:
    raise ValueError(f"a loader with one position for all ranks holds a tensor: {path}")


# ---- copying the bytes ----


@dataclass(frozen=True)
class _RankReport:
    """What one reader has copied from one dump."""

    written: Written
    record: Part
    sums: Mapping[tuple[str, Box], Sums]


def _bring_in(
    merged: _Merged, copies: Mapping[int, Sequence[tuple[int, Dump]]], draft: Draft, me: int
) -> list[_RankReport]:
    return [
        _bring_one(merged, rank, found, draft, me) for rank, found in sorted(copies.items()) if _reader(found) == me
    ]


def _bring_one(merged: _Merged, rank: int, copies: Sequence[tuple[int, Dump]], draft: Draft, me: int) -> _RankReport:
    """Copy the parts that are needed of one dump, from the first copy of it that is whole."""
    mine = [each for each in copies if each[0] == me]
    refused: DamagedCheckpoint | None = None
    for at in range(len(mine)):
        source = _open(mine[at:], me, draft.store.files)
        store, place = source.store, source.store.path(source.name)
        parts, names = [], sorted(merged.parts_of(rank))
        try:
            for name in names:
                part = next(part for part in source.manifest.parts if part.name == name)
                with contextlib.closing(read_part(store.files, place, source.manifest, part)) as blocks:
                    # crash here: a draft with some of its parts; it is torn, and the dumps are where they were.
                    parts.append(draft.write_part(name, blocks))
            sums = _sums(merged, rank, source)
        except DamagedCheckpoint as wrong:
            refused = refused or wrong
            for name in names:
                draft.store.files.remove_file(draft.path / name)
            continue
        record = draft.write_part(rank_part(rank), [encode_rank(rank, merged.ranked[rank])])
        places: dict[tuple[str, Box], Location] = {
            (piece.name, piece.box): merged.places[piece.name, piece.box] for piece in merged.plan.pieces_by_rank[rank]
        }
        return _RankReport(Written(tuple(parts), places), record, sums)
    assert refused is not None
    raise refused


def _sums(merged: _Merged, rank: int, source: _Source) -> dict[tuple[str, Box], Sums]:
    """What each piece adds to its tensor's fingerprint, under every name of it, as taken from the live tensor.

    A fingerprint depends on the name: under a new one it is computed again, from bytes whose old one is verified first.
    """
    old = {new: name for name, new in merged.renamed[rank].items()}
    names: dict[str, list[str]] = {}
    for name, planned in merged.plan.tensors.items():
        names.setdefault(planned.same_as, []).append(name)
    found: dict[tuple[str, Box], Sums] = {}
    for piece in merged.plan.pieces_by_rank[rank]:
        for name in names[piece.name]:
            if name in old:
                place = merged.places[piece.name, piece.box]
                found[name, piece.box] = _recounted(source, old[name], name, piece, place)
            else:
                found[name, piece.box] = source.view.sums[name, piece.box]
    return found


def _recounted(source: _Source, old: str, new: str, piece: Piece, place: Location) -> Sums:
    # Only plain tensors get names of their own, so that the box is the whole tensor.
    box = piece.box
    tensor = torch.empty(box.sizes, dtype=DTYPES[piece.dtype], device="cpu")
    index = Index({old: TensorEntry(tensor.dtype, box.sizes, (Chunk(box, place.part, place.at),))})
    read(source.store, source.name, source.manifest, index, {old: tensor}, World(0, 1))
    if box_sums(old, tensor, box.offsets, box.sizes) != source.view.sums[old, box]:
        finding = f"{old}: its bytes are not those of the live tensor"
        raise DamagedCheckpoint(path=source.store.path(source.name), findings=(finding,))
    return box_sums(new, tensor, box.offsets, box.sizes)


# ---- committing ----


def _commit(
    dump_set: DumpSet,
    merged: _Merged,
    first: View,
    reports: Sequence[Sequence[_RankReport]],
    copies: Mapping[int, Sequence[tuple[int, Dump]]],
    draft: Draft,
    into: AdoptTarget,
) -> str:
    everything = [each for theirs in reports for each in theirs]
    parts = [part for each in everything for part in (*each.written.parts, each.record)]
    parts += finish(merged.plan, [each.written for each in everything], draft)
    trainer = TrainerState(
        step=dump_set.step,
        world_size=dump_set.world_size,
        kinds=first.kinds,
        values=merged.shared,
        per_rank=tuple(sorted(merged.ranked[0])),
        counters=first.counters,
        hyperparameters=first.hyperparameters,
    )
    parts.append(draft.write_part(TRAINER_STATE, [trainer.encode()]))
    described = _described(merged, {key: sums for each in everything for key, sums in each.sums.items()})
    hosts = sorted({machine_of(dump.host) for found in copies.values() for _, dump in found[:1]})
    record = Record(
        kind=SHUTDOWN,
        saved_at_ns=into.at_ns,
        tensors=described,
        fingerprint=combine({name: tensor.digest for name, tensor in described.items()}),
        metadata={
            "world_size": dump_set.world_size,
            "torch": torch.__version__,
            "job": into.number,
            METADATA: {"job": dump_set.job, "hosts": hosts},
        },
    )
    ranks = range(dump_set.world_size)
    plan = [name for rank in ranks for name in (*merged.parts_of(rank), rank_part(rank))]
    plan += [payload.INDEX_PART, payload.METADATA_PART, TRAINER_STATE]
    return commit(draft, plan=plan, parts=parts, record=record, fence=into.fence)


def _described(merged: _Merged, sums: Mapping[tuple[str, Box], Sums]) -> dict[str, Tensor]:
    boxes: dict[str, list[Sums]] = {}
    for (name, _), found in sums.items():
        boxes.setdefault(name, []).append(found)
    return {
        name: Tensor(
            planned.dtype,
            planned.shape,
            print_of(name, DTYPES[planned.dtype], planned.shape, boxes.get(name, ())),
        )
        for name, planned in merged.plan.tensors.items()
    }
