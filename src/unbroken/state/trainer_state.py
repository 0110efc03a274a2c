"""The JSON parts of a checkpoint: what all ranks agree on, and each rank's own. Data, never code."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

from unbroken.errors import ManifestDamaged, NeedsPickle
from unbroken.state.encode import Json, decode, encode
from unbroken.store.directory import Store
from unbroken.store.fields import Malformed, Table
from unbroken.store.manifest import Manifest
from unbroken.store.old_names import updated
from unbroken.store.parts import read_whole

COUNTERS: Final = "counters"
HYPERPARAMETERS: Final = "hyperparameters"
TRAINER_STATE: Final = "trainer_state.json"
_SCHEMA: Final = "unbroken.trainer-state/2"
_RANK_SCHEMA: Final = "unbroken.rank-state/2"


@dataclass(frozen=True)
class TrainerState:
    """What all ranks agree on: the step, each item's kind and values, and which items differ by rank.

    ``hyperparameters`` are the values the run started with, as text; None where a checkpoint was written without them.
    """

    step: int
    world_size: int
    kinds: Mapping[str, str]
    values: Mapping[str, Json]
    per_rank: tuple[str, ...]
    counters: Json = None
    hyperparameters: Mapping[str, str] | None = None

    def encode(self) -> bytes:
        """Its part's bytes."""
        body = {
            "schema": _SCHEMA,
            "step": self.step,
            "world_size": self.world_size,
            "kinds": dict(self.kinds),
            "values": dict(self.values),
            "per_rank": list(self.per_rank),
            "counters": self.counters,
            **({} if self.hyperparameters is None else {HYPERPARAMETERS: dict(self.hyperparameters)}),
        }
        return json_part(body)


def encode_counters(counters: Mapping[str, Any]) -> Json:
    """The loop's own counters as JSON, exactly: infinity is where many a best loss begins.

    Raises:
        NeedsPickle: one is not a plain value; a tensor belongs into an item.
    """
    return encode(dict(counters), item=COUNTERS, path=COUNTERS, take_tensor=_refuse_tensor, allow_pickle=False)


def decode_counters(counters: Json) -> dict[str, Any]:
    """The counters again.

    Raises:
        Malformed: they are not counters.
    """
    found = decode(counters, item=COUNTERS, give_tensor=_no_tensor, allow_pickle=False)
    if not isinstance(found, dict):
        raise Malformed("the counters are not an object")
    return found


def _refuse_tensor(path: str, tensor: torch.Tensor) -> Json:
    raise NeedsPickle(item=COUNTERS, path=path, type_name="Tensor")


def _no_tensor(name: Json) -> torch.Tensor:
    raise Malformed(f"counters hold no tensors, and name {name!r}")


def read_hyperparameters(body: Table) -> Mapping[str, str] | None:
    """The values that a run started with, from a record that may lack them.

    Raises:
        Malformed: one of them is not text.
    """
    if HYPERPARAMETERS not in body:
        return None
    values = Table(body.table(HYPERPARAMETERS), HYPERPARAMETERS)
    return {name: values.text(name) for name in body.table(HYPERPARAMETERS)}


def rank_part(rank: int) -> str:
    """The part that holds one rank's own values."""
    return f"ranks/rank-{rank:05}.json"


def encode_rank(rank: int, values: Mapping[str, Json]) -> bytes:
    """One rank's own values as its part's bytes."""
    return json_part({"schema": _RANK_SCHEMA, "rank": rank, "values": dict(values)})


def json_part(body: Mapping[str, Any]) -> bytes:
    """The bytes of a part that is JSON, the same for the same values."""
    return (json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False) + "\n").encode()


def read_trainer_state(store: Store, name: str, manifest: Manifest) -> TrainerState:
    """The shared record of a checkpoint, its checksums verified first.

    Raises:
        ManifestDamaged: the part is missing from the manifest, or is not such a record; a missing counter is never 0.
        DamagedCheckpoint: its bytes are not what was written.
    """
    body = _table(store, name, manifest, TRAINER_STATE, _SCHEMA)
    try:
        state = TrainerState(
            step=body.whole("step"),
            world_size=body.whole("world_size"),
            kinds={str(k): str(v) for k, v in body.table("kinds").items()},
            values=body.table("values"),
            per_rank=tuple(body.texts("per_rank")),
            counters=dict(body.table("counters")),
            hyperparameters=read_hyperparameters(body),
        )
        decode_counters(state.counters)
    except Malformed as wrong:
        raise ManifestDamaged(path=store.path(name) / TRAINER_STATE, complaint=str(wrong)) from wrong
    if state.step != manifest.step:
        complaint = f"its step is {state.step}, the manifest's is {manifest.step}"
        raise ManifestDamaged(path=store.path(name) / TRAINER_STATE, complaint=complaint)
    return state


def read_rank_values(store: Store, name: str, manifest: Manifest, rank: int) -> Mapping[str, Json]:
    """One rank's own values, their checksums verified first.

    Raises:
        ManifestDamaged: the part is missing from the manifest, or is not such a record.
        DamagedCheckpoint: its bytes are not what was written.
    """
    part = rank_part(rank)
    try:
        return _table(store, name, manifest, part, _RANK_SCHEMA).table("values")
    except Malformed as wrong:
        raise ManifestDamaged(path=store.path(name) / part, complaint=str(wrong)) from wrong


def read_record(store: Store, name: str, manifest: Manifest, part_name: str) -> bytes:
    """The bytes of a part that every such checkpoint has, their checksums verified.

    Raises:
        ManifestDamaged: the part is missing from the manifest.
        DamagedCheckpoint: its bytes are not what was written.
    """
    data = read_whole(store.files, store.path(name), manifest, part_name)
    if data is None:
        raise ManifestDamaged(path=store.path(name) / part_name, complaint="the manifest does not name it")
    return data


def _table(store: Store, name: str, manifest: Manifest, part_name: str, schema: str) -> Table:
    data = read_record(store, name, manifest, part_name)
    try:
        body = Table(updated(json.loads(data)), part_name)
        body.one_of("schema", (schema,))
    except (ValueError, RecursionError, Malformed) as wrong:
        complaint = f"it does not decode: {wrong}"
        raise ManifestDamaged(path=store.path(name) / part_name, complaint=complaint) from wrong
    return body
