"""Plan a tokenization: start a new one, resume, add files to a finished one, or nothing to do.

Compares the request with the records in the output folder; raises if it would mix shards of different options,
tokenizers or texts.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path

from unbroken.data.corpus.listing import LISTING, TokenizerIdentity
from unbroken.data.corpus.shards import BIN_SUFFIX, IDX_SUFFIX, digest_file
from unbroken.data.ingest.documents import Stretch
from unbroken.data.ingest.fast_engine import ENGINE
from unbroken.data.ingest.request import TokenizeOptions
from unbroken.data.ingest.sources import TextSource
from unbroken.data.ingest.units import cut_units
from unbroken.data.ingest.work_folder import Finished, TokenizePlan, WorkFolder
from unbroken.errors import ShardsExist, SourcesChanged, TokenizedDifferently
from unbroken.files import storage_errors
from unbroken.store.digest import BLOCK_BYTES, digest_of

_Kind = tuple[TokenizeOptions, TokenizerIdentity]


def new_plan(
    work: WorkFolder,
    kind: _Kind,
    sources: tuple[TextSource, ...],
    finished: Finished | None,
    *,
    eod_token: str | None,
    targets: Iterator[str],
) -> TokenizePlan:
    """A plan for files that are not in the shards yet.

    Raises:
        ShardsExist: the folders hold shards without a record.
        StorageFailed: an I/O error.
    """
    if finished is None:
        for target in targets:
            _require_no_shards(work, work.output / target)
    units = cut_units(sources, {} if finished is None else finished.units)
    return TokenizePlan(kind[0], kind[1], eod_token, sources, tuple(units))


def _require_no_shards(work: WorkFolder, folder: Path) -> None:
    for node in work.files.list_present(folder):
        # Names with a dot are leftovers of an earlier tokenization, which readers ignore.
        is_shard = node.name.endswith((BIN_SUFFIX, IDX_SUFFIX)) and not node.name.startswith(".")
        if is_shard or node.name == LISTING:
            raise ShardsExist(output=work.output, found=str((folder / node.name).relative_to(work.output)))


def require_same_kind(output: Path, then: _Kind, now: _Kind) -> None:
    """Raise unless new shards would have the same options and tokenizer as the existing ones.

    Raises:
        TokenizedDifferently: they would not; all differences are named.
    """
    were, are = _facts(*then), _facts(*now)
    differences = tuple((name, str(were[name]), str(are[name])) for name in are if were[name] != are[name])
    if differences:
        raise TokenizedDifferently(output=output, differences=differences)


def _facts(options: TokenizeOptions, tokenizer: TokenizerIdentity) -> dict[str, object]:
    # The name of a tokenizer is only for display: the same one may have two paths.
    return {
        "tokenizer": f"{tokenizer.digest} with {tokenizer.vocab_size:,} ids",
        "end of document": tokenizer.eod_id,
        **asdict(options),
    }


# ---- the sources ----


def new_sources(
    work: WorkFolder,
    input_dir: Path,
    found: tuple[TextSource, ...],
    *,
    finished: Finished | None,
    plan: TokenizePlan | None,
    may_add: bool,
    command: str,
) -> tuple[TextSource, ...]:
    """The files that are not in the shards yet; the others are checked to be unchanged.

    Raises:
        SourcesChanged: files changed or are missing, or new files are not to be added.
        StorageFailed: an I/O error.
    """
    sizes = {source.name: source.size_bytes for source in found}
    known = {name: size for name, (size, _) in finished.sources.items()} if finished else {}
    known |= {source.name: source.size_bytes for source in plan.sources} if plan else {}
    resized = {name for name, size in known.items() if sizes.get(name, size) != size}
    if plan is not None:
        # A file that was repaired before any of it was published counts as new.
        resized -= {source.name for source in plan.sources} - _done(work, plan).keys()
    changed = resized | {
        name
        for name in _rewritten(work, input_dir, finished=finished, plan=plan)
        if name in sizes and name not in resized
    }
    gone = known.keys() - sizes.keys()
    added = tuple(source for source in found if source.name not in known)
    if changed or gone or (added and plan) or (added and finished and not may_add):
        raise SourcesChanged(
            output=work.output,
            changed=tuple(sorted(changed)),
            gone=tuple(sorted(gone)),
            added=tuple(source.name for source in added),
            is_finished=plan is None,
            command=command,
        )
    return added


def recut(plan: TokenizePlan, found: tuple[TextSource, ...], finished: Finished | None) -> TokenizePlan:
    """The plan, cut again if some of its files were repaired."""
    sizes = {source.name: source.size_bytes for source in found}
    sources = tuple(TextSource(source.name, sizes[source.name]) for source in plan.sources)
    if sources == plan.sources:
        return plan
    return replace(plan, sources=sources, units=tuple(cut_units(sources, {} if finished is None else finished.units)))


def change_plan(work: WorkFolder, old: TokenizePlan, new: TokenizePlan, *, by: str) -> None:
    """Replace a plan, keeping the units that are finished and still count; ``by`` is the name of this process.

    Other processes at the old plan see that it was replaced; what they have not recorded yet is done again.

    Raises:
        StorageFailed: an I/O error.
    """
    untrusted = (ENGINE,) if new.engine_dropped is not None else ()
    numbers = {unit: number for number, unit in enumerate(new.units)}
    work.files.make_directory(work.units_path(new), durable=True)
    for number, unit in enumerate(old.units):
        record = work.unit(old, number)
        if record is not None and unit in numbers and record.engine not in untrusted:
            # crash here: the old plan; some of its records also exist for the new one, which is not read yet.
            work.record(new, numbers[unit], record)
    # crash here: the old plan or the new one.
    work.replace_plan(new, by=by)


def _rewritten(
    work: WorkFolder, input_dir: Path, *, finished: Finished | None, plan: TokenizePlan | None
) -> Iterator[str]:
    """Files that differ from what was tokenized; only files modified since are read again."""
    if finished is not None:
        since = _moment(work, work.finished_path)
        for name, (size, digest) in finished.sources.items():
            path = input_dir / name
            if (
                _was_touched(path, since)
                and path.stat().st_size == size
                and digest_file(path.resolve()).whole != digest
            ):
                yield name
    if plan is not None:
        since = _moment(work, work.plan_path)
        for name, stretches in _done(work, plan).items():
            if _was_touched(input_dir / name, since) and any(
                _blocks(input_dir / name, stretch) != blocks for stretch, blocks in stretches
            ):
                yield name


def _done(work: WorkFolder, plan: TokenizePlan) -> Mapping[str, list[tuple[Stretch, tuple[str, ...]]]]:
    found: dict[str, list[tuple[Stretch, tuple[str, ...]]]] = {}
    for number in range(len(plan.units)):
        record = work.unit(plan, number)
        for share in record.shares if record else ():
            found.setdefault(share.stretch.name, []).append((share.stretch, share.blocks))
    return found


def _moment(work: WorkFolder, path: Path) -> int:
    found = work.files.find(path)
    return found.modified_ns if found else 0


def _was_touched(path: Path, since_ns: int) -> bool:
    # An equal time counts as later: file system clocks are coarse.
    return path.exists() and path.stat().st_mtime_ns >= since_ns


def _blocks(path: Path, stretch: Stretch) -> tuple[str, ...]:
    with storage_errors("read", path), path.open("rb") as file:
        file.seek(stretch.first)
        chunks = iter(lambda: file.read(min(BLOCK_BYTES, stretch.last - file.tell())), b"")
        return tuple(block.hex() for block in digest_of(chunks).blocks)
