"""Sealing a folder that another tool wrote: a manifest is added, and from then on it is a checkpoint like ours.

The folder's own files are read, made durable and never changed. Nothing in them is executed: names and JSON give the
step and the tool, a safetensors header gives the tensors, and a pickle is only bytes.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from unbroken.disk import NodeKind
from unbroken.errors import CannotSeal, Help, SealedDiffers, StorageFailed
from unbroken.errors.tree import quoted
from unbroken.files import Files, Source
from unbroken.store.check import DEFAULT_WORKERS, Level, verify
from unbroken.store.commit import walk_files
from unbroken.store.digest import BLOCK_BYTES, BlockDigester, PartDigest, block_ranges, digest_bytes
from unbroken.store.directory import Store
from unbroken.store.envelope import begins_one
from unbroken.store.fields import as_whole, parsed
from unbroken.store.manifest import Manifest, Part, Tensor, decode, encode
from unbroken.store.names import (
    ABANDONED,
    CHECKPOINTS,
    DRAFT_PREFIX,
    LATEST,
    MANIFEST,
    PINS,
    QUARANTINE,
    REWINDS,
    SCRATCH_PREFIX,
    SEALED,
    TRASH_PREFIX,
    require_safe,
    scratch,
    step_in_name,
)
from unbroken.store.parts import BlockReader
from unbroken.store.scan import holds_store, scan

# ---- safetensors files ----

_HEADER_LIMIT_BYTES: Final = 100 << 20
_LENGTH_BYTES: Final = 8


def tensors_in(files: Files, path: Path) -> dict[str, Tensor]:
    """Name, type, shape and a digest of each tensor's bytes; empty if the file is not what its name says.

    Raises:
        CannotSeal: the file is shorter than its header says.
        StorageFailed: I/O error.
    """
    with files.reading(path) as source:
        header, start = _header(source, files, path)
        found = {}
        for name, entry in header.items():
            described = _described(entry)
            # A name that is not valid Unicode cannot be written.
            if name != "__metadata__" and described is not None and _is_text(name):
                dtype, shape, begin, end = described
                found[name] = Tensor(dtype, shape, _digest(source, start + begin, start + end))
        return found


def _header(source: Source, files: Files, path: Path) -> tuple[dict[str, Any], int]:
    length = bytearray(_LENGTH_BYTES)
    source.fill(0, memoryview(length))
    size = int.from_bytes(length, "little")
    status = files.find(path)
    if status is None or size > min(_HEADER_LIMIT_BYTES, status.size_bytes):
        return {}, 0
    raw = bytearray(size)
    source.fill(_LENGTH_BYTES, memoryview(raw))
    try:
        header = json.loads(raw)
    except (ValueError, RecursionError):
        return {}, 0
    return (header, _LENGTH_BYTES + size) if isinstance(header, dict) else ({}, 0)


def _is_text(name: str) -> bool:
    return not any("\ud800" <= letter <= "\udfff" for letter in name)


def _described(entry: object) -> tuple[str, tuple[int, ...], int, int] | None:
    match entry:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [int(begin), int(end)]}:
            sizes = tuple(n for n in shape if type(n) is int and n >= 0)
            if len(sizes) == len(shape) and 0 <= begin <= end:
                return dtype, sizes, begin, end
    return None


def _digest(source: Source, start: int, end: int) -> str:
    digester = BlockDigester()
    buffer = memoryview(bytearray(min(BLOCK_BYTES, max(end - start, 1))))
    while start < end:
        taken = source.fill(start, buffer[: min(len(buffer), end - start)])
        if taken == 0:
            reason = f"{source.path.name} ends before its tensors do"
            raise CannotSeal(path=source.path.parent, reason=reason)
        digester.update(buffer[:taken])
        start += taken
    return digester.finish().whole


# ---- sealing ----

_STATE_LIMIT_BYTES: Final = 64 << 20
_JOB: Final = "seal"
_SCRATCH: Final = scratch(_JOB, MANIFEST)
_OURS: Final = (QUARANTINE, ABANDONED, PINS, REWINDS, LATEST)


@dataclass(frozen=True)
class Sealed:
    """A folder that carries a manifest; ``is_new`` is whether this call wrote it."""

    name: str
    manifest: Manifest
    is_new: bool


def seal(
    store: Store,
    name: str,
    *,
    at_ns: int,
    step: int | None = None,
    metrics: Mapping[str, float] | None = None,
    workers: int = DEFAULT_WORKERS,
    progress: Callable[[int], None] | None = None,
) -> Sealed:
    """Add a manifest to a finished folder; one that is sealed already is verified instead.

    Raises:
        CannotSeal: it is empty, holds something that is not a regular file, is being written, or its step is unknown.
        SealedDiffers: it was sealed before and its bytes have changed.
        StorageFailed: I/O error.
    """
    directory = store.path(name)
    _require_sealable(store, name)
    earlier = _earlier_seal(store, name, workers, progress)
    if earlier is not None:
        _require_same(store, earlier, step, metrics)
        return earlier
    names = files_to_seal(store.files, directory)
    before = _stamps(store.files, directory, names)
    known_step = step if step is not None else infer_step(store.files, directory)
    if known_step is None:
        remedy = Help(f"unbroken seal {quoted(directory)} --step 1000", "state the step")
        raise CannotSeal(path=directory, reason="neither its name nor its files state the step", remedy=remedy)
    parts = digest_files(store.files, directory, names, workers, progress)
    if _stamps(store.files, directory, names) != before:
        raise CannotSeal(path=directory, reason="its files changed while they were read; let its writer finish first")
    content = digest_bytes("".join(p.digest.whole + p.name for p in parts).encode()).hex()
    manifest = Manifest(
        # The instant is in it: a run that went back and came to the same bytes again made another checkpoint.
        id=f"{_JOB}-{known_step}-{at_ns:x}-{content}",
        step=known_step,
        kind=SEALED,
        saved_at_ns=at_ns,
        job=_JOB,
        origin=infer_origin(names),
        parts=parts,
        tensors=tensors_of(store.files, directory, parts),
        metrics=metrics or {},
    )
    encoded = encode(manifest)
    decode(encoded, directory / MANIFEST)
    # crash here: the folder as it was, and perhaps a scratch file; or the folder with its manifest.
    store.files.replace(directory / MANIFEST, encoded, scratch=_SCRATCH)
    return Sealed(name, manifest, is_new=True)


def _require_sealable(store: Store, name: str) -> None:
    directory = store.path(name)
    if not name or name in _OURS or name.startswith((DRAFT_PREFIX, TRASH_PREFIX, SCRATCH_PREFIX)):
        raise CannotSeal(path=directory, reason="its name is one that a store keeps for itself")
    inside = scan(Store(directory, store.files))
    if inside.committed or inside.torn or inside.quarantined or inside.abandoned:
        remedy = Help(f"unbroken ls {quoted(directory)}", "list them")
        raise CannotSeal(path=directory, reason="it is a store, with checkpoints of its own in it", remedy=remedy)
    if holds_checkpoints(store.files, directory):
        # Sealed as one checkpoint, a whole run could be pruned like one.
        command = seal_command(store.files, directory)
        remedy = Help(command, "seal each one") if command else Help(f"unbroken ls {quoted(directory)}", "list them")
        raise CannotSeal(path=directory, reason="it holds checkpoints and is not one itself", remedy=remedy)


def _require_same(store: Store, earlier: Sealed, step: int | None, metrics: Mapping[str, float] | None) -> None:
    """A seal is never rewritten, so what is said now must be what was said then."""
    path, known = store.path(earlier.name), earlier.manifest
    remedy = Help(f"unbroken show {quoted(path)}", "show its manifest")
    if step is not None and step != known.step:
        raise CannotSeal(path=path, reason=f"it is sealed already, as step {known.step:,}", remedy=remedy)
    # Compared as text, so that NaN is the same as itself.
    if metrics and str(sorted(metrics.items())) != str(sorted(known.metrics.items())):
        raise CannotSeal(path=path, reason="it is sealed already, with other metrics", remedy=remedy)


def _earlier_seal(store: Store, name: str, workers: int, progress: Callable[[int], None] | None) -> Sealed | None:
    path = store.path(name) / MANIFEST
    found = store.files.find(path)
    if found is None:
        return None
    if found.kind is not NodeKind.FILE or not begins_one(store.files, path):
        raise CannotSeal(path=store.path(name), reason=f"it has a {MANIFEST} that another tool wrote")
    verdict = verify(store, name, Level.FULL, workers=workers, progress=progress)
    changed = [*map(str, verdict.findings), *(f"{extra}: was added after sealing" for extra in verdict.foreign)]
    if changed or verdict.manifest is None:
        raise SealedDiffers(path=store.path(name), findings=tuple(changed))
    return Sealed(name, verdict.manifest, is_new=False)


def files_to_seal(files: Files, directory: Path) -> list[str]:
    """The files of a folder, by name.

    Raises:
        CannotSeal: it has none, or something in it is not a regular file.
        StorageFailed: I/O error.
    """
    names = []
    for name, size_bytes in walk_files(files, directory):
        if name == _SCRATCH:
            files.remove_file(directory / name)
            continue
        if size_bytes is None:
            raise CannotSeal(path=directory, reason=f"{name} is not a regular file, and links are not followed")
        names.append(require_safe(name))
    if not names:
        raise CannotSeal(path=directory, reason="it holds no files")
    return sorted(names)


def _stamps(files: Files, directory: Path, names: list[str]) -> list[tuple[int, int] | None]:
    found = (files.find(directory / name) for name in names)
    return [(status.size_bytes, status.modified_ns) if status else None for status in found]


def digest_files(
    files: Files,
    directory: Path,
    names: list[str],
    workers: int = DEFAULT_WORKERS,
    progress: Callable[[int], None] | None = None,
) -> tuple[Part, ...]:
    """Read and sync the files of a folder; what was read is the evidence for a manifest.

    Raises:
        CannotSeal: a file became shorter meanwhile.
        StorageFailed: I/O error.
    """
    sizes = {name: status.size_bytes for name in names if (status := files.find(directory / name))}
    blocks = [(name, *span) for name in names for span in block_ranges(sizes[name], BLOCK_BYTES)]
    reader = BlockReader(files, BLOCK_BYTES)

    def digest(block: tuple[str, int, int]) -> bytes:
        name, start, end = block
        view = reader.read(directory / name, start, end)
        if len(view) != end - start:
            raise CannotSeal(path=directory, reason=f"{name} became shorter while it was read")
        if progress is not None:
            progress(len(view))
        return digest_bytes(view)

    with ThreadPoolExecutor(workers, thread_name_prefix="unbroken-seal") as pool:
        found: dict[str, list[bytes]] = {name: [] for name in names}
        for (name, _, _), value in zip(blocks, pool.map(digest, blocks), strict=True):
            found[name].append(value)
    for name in names:
        # Its writer may never have synced it; a seal promises bytes that outlive a power cut.
        files.sync_existing(directory / name)
    above = {directory / each for name in names for each in Path(name).parents}
    # The folder's own name, too, may not be on disk yet; a child sorts behind its parent.
    for each in (*sorted(above, reverse=True), directory.parent):
        files.sync_directory(each)
    return tuple(Part(name, PartDigest(sizes[name], tuple(found[name]))) for name in names)


def tensors_of(files: Files, directory: Path, parts: tuple[Part, ...]) -> dict[str, Tensor]:
    """The tensors of all safetensors files of a folder.

    Raises:
        CannotSeal: a file ends before its tensors do.
        StorageFailed: I/O error.
    """
    found: dict[str, Tensor] = {}
    for part in parts:
        if part.name.endswith(".safetensors"):
            for name, tensor in tensors_in(files, directory / part.name).items():
                # Two files may hold a tensor of the same name; neither may hide the other from a comparison.
                found[name if name not in found else f"{part.name}:{name}"] = tensor
    return found


def infer_step(files: Files, directory: Path) -> int | None:
    """The step a folder states: in its trainer's own JSON, in its name, or in the name of one of its files."""
    if (stated := _stated_step(files, directory)) is not None:
        return stated
    steps = {step for name, _ in walk_files(files, directory) if (step := step_in_name(name)) is not None}
    return steps.pop() if len(steps) == 1 else None


def _stated_step(files: Files, directory: Path) -> int | None:
    """The step in a folder's trainer state or its own name; looks at no other file."""
    state = directory / "trainer_state.json"
    if (found := files.find(state)) and found.kind is NodeKind.FILE:
        stated = _step_in_json(files, state)
        if stated is not None:
            return stated
    return step_in_name(directory.absolute().name)


def _step_in_json(files: Files, path: Path) -> int | None:
    try:
        state: Any = parsed(files.read_bytes(path, limit_bytes=_STATE_LIMIT_BYTES))
    except (ValueError, StorageFailed):
        return None
    if isinstance(state, dict):
        for key in ("global_step", "step"):
            if (step := as_whole(state.get(key))) is not None:
                return step
    return None


def infer_origin(names: list[str]) -> str:
    """Which tool wrote a folder, by the names it uses; ``unknown`` where none of them is telling."""
    return next((origin for origin, telling in _ORIGINS if any(telling(n) for n in names)), "unknown")


def _named(*names: str) -> Callable[[str], bool]:
    return lambda name: name.rpartition("/")[2] in names


_ORIGINS: Final[tuple[tuple[str, Callable[[str], bool]], ...]] = (
    ("deepspeed", lambda n: n.endswith(("_optim_states.pt", "_model_states.pt"))),
    ("transformers", _named("trainer_state.json", "training_args.bin")),
    ("accelerate", lambda n: n.startswith("random_states_") and n.endswith(".pkl")),
    ("lightning", lambda n: n.endswith(".ckpt")),
    ("torch-dcp", _named(".metadata")),
    ("torch", lambda n: n.endswith((".pt", ".pth", ".bin"))),
    ("safetensors", lambda n: n.endswith(".safetensors")),
)


def folders_to_seal(store: Store) -> Iterator[str]:
    """The folders in a store that state a step and carry no manifest: what ``seal --all`` takes.

    Raises:
        StorageFailed: I/O error.
    """
    for folder in _unsealed_folders(store.files, store.root):
        if not holds_checkpoints(store.files, folder) and infer_step(store.files, folder) is not None:
            yield folder.name


def _unsealed_folders(files: Files, directory: Path) -> Iterator[Path]:
    for node in files.list_directory(directory):
        if node.kind is not NodeKind.DIRECTORY or node.name.startswith(".") or node.name in (QUARANTINE, ABANDONED):
            continue
        if files.find(directory / node.name / MANIFEST) is None:
            yield directory / node.name


def holds_checkpoints(files: Files, directory: Path) -> bool:
    """Whether a folder holds several checkpoints, as a run or a trainer's output folder does, and so is not one itself.

    Raises:
        StorageFailed: I/O error.
    """
    if holds_store(files, directory):
        return True
    return len({_stated_step(files, folder) for folder in _unsealed_folders(files, directory)} - {None}) > 1


def seal_command(files: Files, directory: Path) -> str | None:
    """The command that seals what a folder holds; None where it holds nothing that can be sealed.

    Only names are looked at, and only in the folder itself and the folders directly in it.

    Raises:
        StorageFailed: I/O error.
    """
    if holds_store(files, directory):
        inner = directory / CHECKPOINTS
        is_full = any(_stated_step(files, folder) is not None for folder in _unsealed_folders(files, inner))
        return f"unbroken seal {quoted(inner)} --all" if is_full else None
    folders = list(_unsealed_folders(files, directory))
    if any(holds_store(files, folder) for folder in folders):
        return None
    inside = {_stated_step(files, folder) for folder in folders} - {None}
    own = _stated_step(files, directory)
    if len(inside) > 1 or (inside and own is None):
        return f"unbroken seal {quoted(directory)} --all"
    names = [node.name for node in files.list_directory(directory) if node.kind is NodeKind.FILE]
    if own is not None or len({step_in_name(name) for name in names} - {None}) == 1:
        return f"unbroken seal {quoted(directory)}" if names or folders else None
    return f"unbroken seal {quoted(directory)} --step 1000" if names else None
