"""The emergency dump of one rank: all that it holds, taken at the end of a step, without the other ranks.

A dump is a directory with a manifest like any checkpoint's, and the tensors lie in the same parts; but it is one rank's
view. Beside the tensors is a record of that view (what the rank holds of each tensor and where it lies, every
item's values, the digests by which ranks find out what they have in common), so that the comparison which an ordinary
save makes between live ranks can be made later, between dumps.
"""

import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, cast

import torch

from unbroken.errors import ManifestDamaged, NeedsPeers, UnbrokenError
from unbroken.quoting.log import logger
from unbroken.state.capture import RNG, RNG_TENSORS, LocalState, is_sharded, own_prefix, own_unless_sharded, take_alone
from unbroken.state.cursor import Cursor
from unbroken.state.encode import Json
from unbroken.state.fingerprint import box_sums
from unbroken.state.flatten import flatten
from unbroken.state.host_copy import as_bits
from unbroken.state.index import DTYPES, Box
from unbroken.state.items import Item, ModuleItem, ObjectItem, OptimizerItem, State
from unbroken.state.naming import is_flat_sharded
from unbroken.state.payload import Location, share_out, write_bundles
from unbroken.state.pieces import Held, held_by, local_piece, number_of_files
from unbroken.state.planners import Piece
from unbroken.state.stage import StagedPiece
from unbroken.state.trainer_state import HYPERPARAMETERS, encode_counters, json_part, read_hyperparameters, read_record
from unbroken.store.commit import Record, begin, commit, point_latest
from unbroken.store.directory import Store
from unbroken.store.dumps import METADATA, dump_name
from unbroken.store.fields import MOST_RANKS, Malformed, Table
from unbroken.store.manifest import Manifest
from unbroken.store.names import EMERGENCY
from unbroken.store.old_names import updated
from unbroken.world import World

RECORD_PART: Final = "emergency.json"
_SCHEMA: Final = "unbroken.emergency/2"
_log = logger(__name__)


@dataclass(frozen=True)
class DumpOwner:
    """The run, job and host that a dump belongs to."""

    run: str
    job: str
    host: str


Sums = tuple[int, int]


@dataclass(frozen=True)
class View:
    """One rank's state as its dump holds it.

    Attributes:
        rank: whose it is.
        world: how many ranks there were.
        step: the steps completed.
        kinds: the kind of each item.
        values: each item's values, tensors by name; and the RNG states.
        own_values: the values of objects with tensors under names that only this rank uses, with the new name of each.
        digests: of each item, to compare with those of other ranks.
        copies: of each tensor that every rank holds whole, to compare.
        held: what this rank holds of each tensor.
        places: where each box lies, under the one name that it is written under.
        sums: what each box adds to the fingerprint of its tensor, under every name of it.
        counters: the loop's own.
        share: samples that this rank's loader has served and not yet reported; None where it keeps no account.
        shares_rng: whether all ranks have the same RNG states.
        hyperparameters: the values that the run began with.
    """

    rank: int
    world: int
    step: int
    kinds: Mapping[str, str]
    values: Mapping[str, Json]
    own_values: Mapping[str, tuple[Json, Mapping[str, str]]]
    digests: Mapping[str, str]
    copies: Mapping[str, str]
    held: Sequence[Held]
    places: Mapping[tuple[str, Box], Location]
    sums: Mapping[tuple[str, Box], Sums]
    counters: Json
    share: Json = None
    shares_rng: bool = False
    hyperparameters: Mapping[str, str] | None = None


@dataclass(frozen=True)
class Dumped:
    """A dump that is durable."""

    store: Store
    name: str
    manifest: Manifest


def dump(
    items: Sequence[Item],
    generators: Callable[[], State],
    world: World,
    store: Store,
    *,
    step: int,
    counters: Mapping[str, Any],
    whose: DumpOwner,
    at_ns: int,
    allow_pickle: Collection[str] = (),
    shares_rng: bool = False,
    files_per_rank: int | None = None,
    hyperparameters: Mapping[str, str] | None = None,
) -> Dumped:
    """Write all that this rank holds, durably, into a store of its own. Not collective: other ranks may be gone.

    Call it only between steps. Nothing is copied first: the loop waits.

    Raises:
        NeedsPeers: an item cannot say its state alone.
        NeedsPickle: a value can only be stored by pickle, and its item is not allowed to.
        TensorUnsupported: a tensor is of a kind that a checkpoint cannot hold.
        StorageFailed: I/O error; there is no dump.
    """
    require_alone(items)
    encoded = encode_counters(counters)
    called = RNG_TENSORS if shares_rng else own_prefix(world.rank, RNG_TENSORS)
    taken = take_alone(items, generators, called, world, allow_pickle)
    tensors = {**{n: t for found in taken.flat.values() for n, t in found.tensors.items()}, **taken.drawn.tensors}
    held = held_by(tensors)
    draft = begin(store, step=step, job=whose.job)
    try:
        bundles = _bundles(items, taken, held, tensors, files_per_rank)
        written = write_bundles(bundles, draft, world.rank)
        view = replace(
            _view(items, taken, held, tensors, world, allow_pickle),
            step=step,
            places=written.places,
            counters=encoded,
            shares_rng=shares_rng,
            hyperparameters=hyperparameters,
        )
        # crash here: a draft with some of its parts; it is torn.
        parts = (*written.parts, draft.write_part(RECORD_PART, [_encode(view)]))
        belongs_to = {"run": whose.run, "rank": world.rank, "world_size": world.size, "host": whose.host}
        name = commit(
            draft,
            plan=[part.name for part in parts],
            parts=parts,
            record=Record(EMERGENCY, at_ns, metadata={METADATA: belongs_to, "torch": torch.__version__}),
            called=dump_name(step, at_ns),
        )
    except BaseException:
        # The room that it takes is what the next attempt needs.
        _give_up(store, draft.path.name)
        raise
    point_latest(store, name, job=whose.job)
    return Dumped(store, name, store.read_manifest(name))


def _give_up(store: Store, name: str) -> None:
    try:
        store.files.remove_tree(store.path(name))
    except UnbrokenError as refused:
        _log.warning("could not remove the unfinished dump %s: %s", name, refused.message)


def require_alone(items: Sequence[Item]) -> None:
    """Pass if every item can say its state without the other ranks.

    Raises:
        NeedsPeers: one cannot.
    """
    for item in items:
        if isinstance(item, ModuleItem | OptimizerItem) and is_flat_sharded(item.module):
            raise NeedsPeers(item=item.name, type_name="FullyShardedDataParallel of the older kind")


@dataclass(frozen=True)
class _LivePiece(StagedPiece):
    """A piece that is copied only when its turn to be written comes: the loop is paused meanwhile."""

    source: torch.Tensor = field(default_factory=lambda: torch.empty(0))

    def views(self) -> list[memoryview]:
        """The bytes as they are now."""
        flat = as_bits(self.source.detach().cpu()).contiguous().reshape(-1)
        return [memoryview(cast("bytes", flat.view(torch.uint8).numpy()))]


def filled_boxes(one: Held) -> list[Box]:
    """The boxes of a tensor that have elements here; one without any where the tensor has none at all."""
    return [box for box in one.boxes if box.elements or not math.prod(one.shape)]


def _bundles(
    items: Sequence[Item],
    taken: LocalState,
    held: Sequence[Held],
    tensors: Mapping[str, torch.Tensor],
    files: int | None,
) -> list[list[StagedPiece]]:
    """What every rank may hold alike, in so many files; and in one more what is this rank's own.

    Apart, because a later job brings in only the files it needs: of replicas, those of one rank.
    """
    objects = {item.name for item in items if isinstance(item, ObjectItem)}
    loose = {n for name in objects for n, t in taken.flat[name].tensors.items() if not is_sharded(t)}
    loose |= taken.drawn.tensors.keys()
    common: list[StagedPiece] = []
    own: list[StagedPiece] = []
    for one in held:
        if one.same_as not in ("", one.name):
            continue
        pieces = [
            _LivePiece(Piece(one.name, one.dtype, box), (), local_piece(tensors, one.name, box))
            for box in filled_boxes(one)
        ]
        (own if one.name in loose else common).extend(pieces)
    shared = share_out(common, number_of_files([one.piece for one in common], files)) if common else []
    return [*shared, own] if own else shared


def _view(
    items: Sequence[Item],
    taken: LocalState,
    held: Sequence[Held],
    tensors: Mapping[str, torch.Tensor],
    world: World,
    allow_pickle: Collection[str],
) -> View:
    """What this rank holds, before anybody knows where it will lie."""
    return View(
        rank=world.rank,
        world=world.size,
        step=0,
        kinds={item.name: item.kind for item in items},
        values={**{n: found.structure for n, found in taken.flat.items()}, RNG: taken.drawn.structure},
        own_values=_own_values(items, taken, world.rank, allow_pickle),
        digests=taken.digests,
        copies=taken.copies,
        held=held,
        places={},
        sums=_sums(held, tensors),
        counters=None,
        share=_share(items) if world.size > 1 else None,
    )


def _sums(held: Sequence[Held], tensors: Mapping[str, torch.Tensor]) -> dict[tuple[str, Box], Sums]:
    return {
        (one.name, box): box_sums(one.name, local_piece(tensors, one.name, box), box.offsets, one.shape)
        for one in held
        for box in filled_boxes(one)
    }


def _share(items: Sequence[Item]) -> Json:
    """What a loader with one position for all ranks has served here since the ranks last added up."""
    for item in items:
        if isinstance(item, ObjectItem) and isinstance(item.stateful, Cursor) and item.stateful.positioned is not None:
            return cast("Json", item.stateful.positioned.served_share().as_json())
    return None


def _own_values(
    items: Sequence[Item], taken: LocalState, rank: int, allow_pickle: Collection[str]
) -> dict[str, tuple[Json, Mapping[str, str]]]:
    """Every object's values once more, should they turn out to differ by rank: with tensors under this rank's names."""
    own: dict[str, tuple[Json, Mapping[str, str]]] = {}
    for item in items:
        if isinstance(item, ObjectItem):
            is_allowed, called = item.name in allow_pickle, own_unless_sharded(rank)
            mine = flatten(item.name, taken.states[item.name], allow_pickle=is_allowed, called=called)
            own[item.name] = (mine.structure, dict(zip(taken.flat[item.name].tensors, mine.tensors, strict=True)))
    return own


# ---- the record ----


def _encode(view: View) -> bytes:
    body: dict[str, Any] = {
        "schema": _SCHEMA,
        "rank": view.rank,
        "world_size": view.world,
        "step": view.step,
        "kinds": dict(view.kinds),
        "values": dict(view.values),
        "rank_values": {name: {"values": v, "names": dict(names)} for name, (v, names) in view.own_values.items()},
        "digests": dict(view.digests),
        "replica_digests": dict(view.copies),
        "tensors": [[h.name, h.dtype, list(h.shape), [_box_out(box) for box in h.boxes], h.same_as] for h in view.held],
        "locations": [
            [n, _box_out(box), [p.part, p.blob_at, p.blob_bytes, p.at]] for (n, box), p in view.places.items()
        ],
        "fingerprint_sums": [[name, _box_out(box), list(sums)] for (name, box), sums in view.sums.items()],
        "counters": view.counters,
        "unreported_samples": view.share or {},
        "shares_rng": view.shares_rng,
        **({} if view.hyperparameters is None else {HYPERPARAMETERS: dict(view.hyperparameters)}),
    }
    return json_part(body)


def _box_out(box: Box) -> list[list[int]]:
    return [list(box.offsets), list(box.sizes)]


def read_view(store: Store, name: str, manifest: Manifest) -> View:
    """The record of a dump, its checksums verified first.

    Raises:
        ManifestDamaged: it is missing from the manifest, or is not such a record.
        DamagedCheckpoint: its bytes are not what was written.
        StorageFailed: I/O error.
    """
    path = store.path(name) / RECORD_PART
    data = read_record(store, name, manifest, RECORD_PART)
    try:
        found = updated(json.loads(data))
        body = Table(found, RECORD_PART)
        body.one_of("schema", (_SCHEMA,))
        view = _decode(body, found)
    except (ValueError, TypeError, KeyError, RecursionError, Malformed) as wrong:
        raise ManifestDamaged(path=path, complaint=f"it does not decode: {wrong}") from wrong
    if view.step != manifest.step:
        raise ManifestDamaged(path=path, complaint=f"its step is {view.step}, the manifest's is {manifest.step}")
    return view


def _decode(body: Table, found: Mapping[str, Any]) -> View:
    held = [
        Held(name, dtype, tuple(shape), tuple(_box_in(box) for box in boxes), same_as)
        for name, dtype, shape, boxes, same_as in found["tensors"]
    ]
    if unknown := [one.dtype for one in held if one.dtype not in DTYPES]:
        raise Malformed(f"unknown dtype {unknown[0]!r}")
    return View(
        rank=body.whole("rank", below=MOST_RANKS),
        world=body.whole("world_size", below=MOST_RANKS),
        step=body.whole("step"),
        kinds={str(k): str(v) for k, v in body.table("kinds").items()},
        values=body.table("values"),
        own_values={name: (own["values"], own["names"]) for name, own in body.table("rank_values").items()},
        digests=body.table("digests"),
        copies=body.table("replica_digests"),
        held=held,
        places={(name, _box_in(box)): Location(*place) for name, box, place in found["locations"]},
        sums={(name, _box_in(box)): (first, second) for name, box, (first, second) in found["fingerprint_sums"]},
        counters=dict(body.table("counters")),
        share=dict(body.table("unreported_samples")) or None,
        shares_rng=body.flag("shares_rng"),
        hyperparameters=read_hyperparameters(body),
    )


def _box_in(box: Sequence[Sequence[int]]) -> Box:
    offsets, sizes = box
    return Box(tuple(offsets), tuple(sizes))
