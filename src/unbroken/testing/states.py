"""Compare the state of two checkpoints: every tensor by its fingerprint, every value by its JSON.

Writers, time and number of files do not matter. State per rank can be compared only between equal world sizes;
otherwise it is left out, and named. Reads manifests and records, and of a framework's checkpoint the pickled parts
whose bytes differ: only for those torch is needed.
"""

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from unbroken.errors import ManifestDamaged
from unbroken.quoting import amounts
from unbroken.store.compare import is_gradient_of_one, is_gradients
from unbroken.store.directory import Store
from unbroken.store.fields import Malformed
from unbroken.store.manifest import Manifest
from unbroken.store.old_names import updated
from unbroken.store.parts import read_whole

TRAINER_STATE: Final = "trainer_state.json"
_BY_RANK: Final = "ranks"
_OWN_TENSOR: Final = re.compile(rf"{_BY_RANK}\.[0-9]+\.(?P<item>[^.]+)")
_RNG: Final = "rng_state"
# The state of an RNG, and the one with which a loader started its epoch; anything after the name is inside it.
_GENERATOR: Final = re.compile(
    rf"(?:{_BY_RANK}\.[0-9]+\.)?(?:data\.(?:.+\.)?)?(?P<at>{_RNG}|generators|began)\.(?P<name>[a-z]+)(?:\..*)?"
)
# Parts of a framework's checkpoint: the RNG states that unbroken has added, and what is no weight.
_RNG_PART: Final = re.compile(r"unbroken_rng_(?P<rank>[0-9]+)\.pt")
_STATE_PART: Final = re.compile(r"(optimizer|scheduler|scaler|sampler|custom_checkpoint)[^/]*\.(pt|bin|pkl)")
# Where the loop of a framework was: what follows the last step of an epoch may change all but the weights.
_PLACE: Final = "place"
_PICKLED: Final = (".pt", ".pth", ".bin", ".pkl")
_LONGEST_VALUE: Final = 40
_MOST_NAMED: Final = 8


@dataclass(frozen=True)
class StateComparison:
    """The comparison of two checkpoints.

    Attributes:
        a: the first checkpoint's name.
        b: the second one's.
        step: the step of the first.
        tensors: how many were compared and are equal.
        values: how many items' values were compared and are equal.
        tensors_differing: each tensor that is not the same, by name.
        values_differing: each value that is not, as ``item.path: this and that``.
        by_rank: what each rank keeps for itself and was not compared, since the worlds are of different sizes.
        idle: RNGs that differ and were ignored, since they were not used.
    """

    a: str
    b: str
    step: int
    tensors: int
    values: int
    tensors_differing: tuple[str, ...] = ()
    values_differing: tuple[str, ...] = ()
    by_rank: tuple[str, ...] = ()
    idle: tuple[str, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether neither a tensor nor a value was compared."""
        return self.is_equal and not (self.tensors or self.values)

    @property
    def is_equal(self) -> bool:
        """Whether nothing that was compared differs."""
        return not (self.tensors_differing or self.values_differing)

    def lines(self) -> list[str]:
        """The result as text."""
        if self.is_equal:
            which = f"of {self.a}" if self.a == self.b else f"of {self.a} and {self.b}"
            said = [f"{_all(self.tensors, 'tensor')} and {_all(self.values, 'value')} {which} are equal"]
        else:
            said = [f"tensor {name} of {self.b} differs" for name in self.tensors_differing[:_MOST_NAMED]]
            said += [f"value {each}" for each in self.values_differing[:_MOST_NAMED]]
            named = min(len(self.tensors_differing), _MOST_NAMED) + min(len(self.values_differing), _MOST_NAMED)
            more = len(self.tensors_differing) + len(self.values_differing) - named
            said += [f"and {amounts.count(more)} more"] if more else []
        if self.idle:
            said.append(f"RNGs never seeded or used, ignored: {', '.join(self.idle)}")
        if self.by_rank:
            said.append(f"state per rank, not compared between different world sizes: {', '.join(self.by_rank)}")
        return said


def _all(number: int, noun: str) -> str:
    return f"all {amounts.plural(number, noun)}" if number > 1 else amounts.plural(number, noun)


def compare_checkpoints(
    a: Store,
    name_a: str,
    b: Store,
    name_b: str,
    *,
    drawn: Collection[str] | None = None,
    idle: Collection[str] | None = None,
) -> StateComparison:
    """Compare two checkpoints of any two runs, without loading tensors; checksums of what is read are verified.

    Args:
        a: the store of the first.
        name_a: its name there.
        b: the store of the second.
        name_b: its name there.
        drawn: the RNGs to compare, as ``drawn_generators`` names them; by default all.
        idle: the RNGs that may be ignored, if known; all others are compared.

    Raises:
        ManifestDamaged: a manifest is damaged.
        DamagedCheckpoint: a record is damaged.
        FormatUnknown: another version wrote it.
        StorageFailed: an I/O error.
    """
    first, second = a.read_manifest(name_a), b.read_manifest(name_b)
    record_a, record_b = _record(a, name_a, first), _record(b, name_b, second)
    is_one_size = record_a.get("world_size") == record_b.get("world_size")
    ranked = set() if is_one_size else {*record_a.get("per_rank", ()), *record_b.get("per_rank", ())}
    is_one_place = first.metadata.get(_PLACE) == second.metadata.get(_PLACE)
    tensors_a, own_a = _told_tensors(first, is_one_size=is_one_size, is_one_place=is_one_place)
    tensors_b, own_b = _told_tensors(second, is_one_size=is_one_size, is_one_place=is_one_place)
    values_a, values_b = _values(record_a, ranked), _values(record_b, ranked)
    if is_one_size and is_one_place:
        values_a |= _rank_values(a, name_a, first)
        values_b |= _rank_values(b, name_b, second)
    names = sorted(name for name in {*tensors_a, *tensors_b} if not is_gradient_of_one(name, tensors_a, tensors_b))
    unlike = [name for name in names if tensors_a.get(name) != tensors_b.get(name)]
    places_of = {name: _by_value(name, (a, name_a, first), (b, name_b, second)) for name in unlike}
    tensors = [place for places in places_of.values() for place in places]
    items = sorted(name for name in {*values_a, *values_b} if not is_gradients(name))
    changed = {name: list(_places((name,), values_a.get(name), values_b.get(name))) for name in items}
    paths = [*tensors, *(path for places in changed.values() for path, _ in places)]
    unused = {path for path in paths if _is_idle(path, drawn, idle)}
    said = {name: [how for path, how in places if path not in unused] for name, places in changed.items()}
    return StateComparison(
        a=name_a,
        b=name_b,
        step=first.step,
        tensors=len(names) - sum(bool(places) for places in places_of.values()),
        values=sum(not places for places in said.values()),
        tensors_differing=tuple(name for name in tensors if name not in unused),
        values_differing=tuple(places[0] for places in said.values() if places),
        by_rank=tuple(sorted(ranked | own_a | own_b)),
        idle=tuple(sorted({found["name"] for path in unused if (found := _GENERATOR.match(path))})),
    )


def drawn_generators(store: Store, names: Iterable[str]) -> set[str]:
    """The RNGs that were used between some of a run's checkpoints: their states are not all the same.

    A process starts with unseeded RNGs, so two runs that never use one of them differ in it without any effect.

    Raises:
        CheckpointError: one of them is damaged.
        StorageFailed: an I/O error.
    """
    states: dict[tuple[str, type], set[str]] = {}
    for name in names:
        manifest = store.read_manifest(name)
        record = _record(store, name, manifest)
        values = {**_values(record, set()), **_rank_values(store, name, manifest)}
        # Both, under one name: if the state of an RNG is a tensor, its value only says so.
        for path, state in (*manifest.tensors.items(), *values.items()):
            if (found := _GENERATOR.match(path)) and found["at"] != "began":
                states.setdefault((path, type(state)), set()).add(repr(state))
    return {_GENERATOR.sub(r"\g<name>", path) for (path, _), seen in states.items() if len(seen) > 1}


def _is_idle(path: str, drawn: Collection[str] | None, idle: Collection[str] | None) -> bool:
    found = _GENERATOR.match(path)
    if found is None or drawn is None or found["name"] in drawn:
        return False
    return idle is None or found["name"] in idle


def _told_tensors(manifest: Manifest, *, is_one_size: bool, is_one_place: bool) -> tuple[dict[str, object], set[str]]:
    """The fingerprint of each tensor, and the items kept per rank; digests of parts, if no tensor is named.

    The names of tensors in a framework's checkpoint may be those of its weights alone: its optimizer is a part.
    """
    parts = {part.name: part.digest.whole for part in manifest.parts if not _RNG_PART.fullmatch(part.name)}
    if not manifest.tensors:
        return {name: digest for name, digest in parts.items() if name != TRAINER_STATE}, set()
    described: dict[str, object] = {
        name: digest for name, digest in parts.items() if is_one_place and _STATE_PART.fullmatch(name)
    }
    own: set[str] = set()
    for name, tensor in manifest.tensors.items():
        owner = _OWN_TENSOR.match(name)
        if owner and not is_one_size:
            own.add(owner["item"])
        else:
            described[name] = tensor
    return described, own


def _record(store: Store, name: str, manifest: Manifest) -> dict[str, Any]:
    """The record common to all ranks; empty for a folder of another tool, which has none."""
    return _json_part(store, name, manifest, TRAINER_STATE) or {}


def _values(record: Mapping[str, Any], left_out: set[str]) -> dict[str, Any]:
    found = _by_generator({name: value for name, value in record.get("values", {}).items() if name not in left_out})
    return {**found, "counters": record["counters"]} if "counters" in record else found


def _rank_values(store: Store, name: str, manifest: Manifest) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for part in manifest.parts:
        if part.name.startswith(f"{_BY_RANK}/"):
            record = _json_part(store, name, manifest, part.name) or {}
            own = _by_generator(record.get("values", {}))
            found |= {f"{_BY_RANK}.{record.get('rank')}.{item}": each for item, each in own.items()}
        elif of_framework := _RNG_PART.fullmatch(part.name):
            data = read_whole(store.files, store.path(name), manifest, part.name) or b""
            found |= _framework_rng(f"{_BY_RANK}.{of_framework['rank']}", part.name, data)
    return found


def _framework_rng(owner: str, part: str, data: bytes) -> dict[str, Any]:
    """The RNG states that a rank of a framework's job has saved."""
    from unbroken.testing.pickled_parts import as_json, read_pickled

    held = read_pickled(part, data)
    states = held.get("rng") if isinstance(held, dict) else None
    return {f"{owner}.{_RNG}.{name}": as_json(state) for name, state in (states or {}).items()}


_Saved = tuple[Store, str, Manifest]


def _by_value(name: str, a: _Saved, b: _Saved) -> list[str]:
    """Where a tensor, or a part of a framework's checkpoint, differs; a pickled part is compared by its values."""
    if name in a[2].tensors or not name.endswith(_PICKLED):
        return [name]
    from unbroken.testing.pickled_parts import differing

    found = [read_whole(store.files, store.path(at), manifest, name) for store, at, manifest in (a, b)]
    if None in found:
        return [name]
    places = differing(name, *(each or b"" for each in found))
    return [name] if places is None else places


def _by_generator(values: Mapping[str, Any]) -> dict[str, Any]:
    """Items by name, with each RNG as an item of its own."""
    found = {name: value for name, value in values.items() if name != _RNG}
    generators = _opened(values.get(_RNG))
    if isinstance(generators, dict):
        found |= {f"{_RNG}.{name}": state for name, state in generators.items()}
    return found


def _json_part(store: Store, name: str, manifest: Manifest, part_name: str) -> dict[str, Any] | None:
    data = read_whole(store.files, store.path(name), manifest, part_name)
    if data is None:
        return None
    try:
        found = updated(json.loads(data))
    except (ValueError, RecursionError, Malformed) as wrong:
        raise ManifestDamaged(path=store.path(name) / part_name, complaint=f"it does not decode: {wrong}") from wrong
    return found if isinstance(found, dict) else {}


def _places(path: tuple[str, ...], a: Any, b: Any) -> Iterator[tuple[str, str]]:  # noqa: ANN401 -- any JSON
    """Every path at which two values differ, with both values."""
    a, b = _opened(a), _opened(b)
    if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        for key in a:
            yield from _places((*path, key), a[key], b[key])
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        for index, (one, other) in enumerate(zip(a, b, strict=True)):
            yield from _places((*path, str(index)), one, other)
    elif _spelled(a) != _spelled(b):
        name = ".".join(path)
        yield name, f"{name}: {_short(a)} and {_short(b)}"


def _opened(value: Any) -> Any:  # noqa: ANN401 -- whatever JSON held
    """A table or a sequence without its type tag."""
    match value:
        case {"dict": [*pairs]} if len(value) == 1 and all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
            return {json.dumps(key).strip('"'): each for key, each in pairs}
        case {"tuple": [*items]} if len(value) == 1:
            return items
    return value


def _spelled(value: object) -> str:
    # By its JSON text: 1, 1.0 and true are equal in Python, but load as different values.
    return json.dumps(value, sort_keys=True)


def _short(value: object) -> str:
    text = _spelled(value) if value is not None else "nothing"
    return text if len(text) <= _LONGEST_VALUE else f"{text[: _LONGEST_VALUE - 3]}..."
