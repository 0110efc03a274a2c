"""What is to be done when a tokenization is asked for: begin one, go on with one, add to one, or nothing.

Compares what is asked for with what is recorded in the output folder, and refuses by name whatever would put shards of
two kinds, or of other text, side by side.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path

from unbroken.data.corpus.listing import LISTING, TokenizerIdentity
from unbroken.data.corpus.shards import BIN_SUFFIX, IDX_SUFFIX, digest_file
from unbroken.data.ingest.documents import Stretch
from unbroken.data.ingest.sources import Source
from unbroken.data.ingest.unit_work import Terms, clear_unit
from unbroken.data.ingest.units import cut_units
from unbroken.data.ingest.workbench import Finished, Options, Plan, Workbench
from unbroken.errors import ShardsExist, SourcesChanged, TokenizedDifferently
from unbroken.files import storage_errors
from unbroken.store.digest import BLOCK_BYTES, digest_of

_Kind = tuple[Options, TokenizerIdentity]


def new_plan(
    bench: Workbench,
    kind: _Kind,
    sources: tuple[Source, ...],
    finished: Finished | None,
    *,
    eod_token: str | None,
    targets: Iterator[str],
) -> Plan:
    """A plan for files of which nothing is in the shards yet.

    Raises:
        ShardsExist: the folders hold shards that are not recorded.
        StorageFailed: the system refused.
    """
    if finished is None:
        for target in targets:
            _require_no_shards(bench, bench.output / target)
    units = cut_units(sources, {} if finished is None else finished.units)
    return Plan(kind[0], kind[1], eod_token, sources, tuple(units))


def _require_no_shards(bench: Workbench, folder: Path) -> None:
    for node in bench.files.list_directory(folder) if bench.files.find(folder) is not None else ():
        if node.name.endswith((BIN_SUFFIX, IDX_SUFFIX)) or node.name == LISTING:
            raise ShardsExist(output=bench.output, found=str((folder / node.name).relative_to(bench.output)))


def require_same_kind(output: Path, then: _Kind, now: _Kind) -> None:
    """Pass if shards made now would be of the same kind as those there are.

    Raises:
        TokenizedDifferently: they would not; every difference is named.
    """
    were, are = _facts(*then), _facts(*now)
    differences = tuple((name, str(were[name]), str(are[name])) for name in are if were[name] != are[name])
    if differences:
        raise TokenizedDifferently(output=output, differences=differences)


def _facts(options: Options, tokenizer: TokenizerIdentity) -> dict[str, object]:
    # The name of a tokenizer is for people: the same one may lie under two paths.
    return {
        "tokenizer": f"{tokenizer.digest} with {tokenizer.vocab_size:,} ids",
        "end of document": tokenizer.eod_id,
        **asdict(options),
    }


# ---- the sources ----


def new_sources(
    bench: Workbench,
    input_dir: Path,
    found: tuple[Source, ...],
    *,
    finished: Finished | None,
    plan: Plan | None,
    may_add: bool,
    command: str,
) -> tuple[Source, ...]:
    """The files of which nothing is in the shards yet, after the others are found to be what they were.

    Raises:
        SourcesChanged: files changed, are gone, or are new and not to be added.
        StorageFailed: the system refused.
    """
    sizes = {source.name: source.size_bytes for source in found}
    known = {name: size for name, (size, _) in finished.sources.items()} if finished else {}
    known |= {source.name: source.size_bytes for source in plan.sources} if plan else {}
    resized = {name for name, size in known.items() if sizes.get(name, size) != size}
    if plan is not None:
        # A file that was repaired before anything of it was published is as good as new.
        resized -= {source.name for source in plan.sources} - _done(bench, plan).keys()
    changed = resized | {
        name
        for name in _rewritten(bench, input_dir, finished=finished, plan=plan)
        if name in sizes and name not in resized
    }
    gone = known.keys() - sizes.keys()
    added = tuple(source for source in found if source.name not in known)
    if changed or gone or (added and plan) or (added and finished and not may_add):
        raise SourcesChanged(
            output=bench.output,
            changed=tuple(sorted(changed)),
            gone=tuple(sorted(gone)),
            added=tuple(source.name for source in added),
            is_finished=plan is None,
            command=command,
        )
    return added


def recut(bench: Workbench, terms: Terms, plan: Plan, found: tuple[Source, ...], finished: Finished | None) -> bool:
    """Cut a plan anew if files of it were repaired; what is done and still fits is kept. Says whether it was cut.

    Raises:
        StorageFailed: the system refused.
    """
    sizes = {source.name: source.size_bytes for source in found}
    sources = tuple(Source(source.name, sizes[source.name]) for source in plan.sources)
    if sources == plan.sources:
        return False
    units = tuple(cut_units(sources, {} if finished is None else finished.units))
    new = replace(plan, sources=sources, units=units)
    numbers = {unit: number for number, unit in enumerate(units)}
    for number, unit in enumerate(plan.units):
        record = bench.unit(plan, number)
        if unit in numbers and record is not None:
            # crash here: the old plan, with some of its records also under the new one, which nobody reads yet.
            bench.record(new, numbers[unit], record)
        else:
            # crash here: the old plan, with fewer records; the next start cuts it anew as well.
            bench.forget(plan, number)
            clear_unit(terms, unit)
    # crash here: the old plan or the new one.
    bench.replace_plan(new)
    return True


def _rewritten(bench: Workbench, input_dir: Path, *, finished: Finished | None, plan: Plan | None) -> Iterator[str]:
    """Files whose bytes are not those that were tokenized; only what was touched since is read again."""
    if finished is not None:
        since = _moment(bench, bench.finished_path)
        for name, (size, digest) in finished.sources.items():
            path = input_dir / name
            if (
                _was_touched(path, since)
                and path.stat().st_size == size
                and digest_file(path.resolve()).whole != digest
            ):
                yield name
    if plan is not None:
        since = _moment(bench, bench.plan_path)
        for name, stretches in _done(bench, plan).items():
            if _was_touched(input_dir / name, since) and any(
                _blocks(input_dir / name, stretch) != blocks for stretch, blocks in stretches
            ):
                yield name


def _done(bench: Workbench, plan: Plan) -> Mapping[str, list[tuple[Stretch, tuple[str, ...]]]]:
    found: dict[str, list[tuple[Stretch, tuple[str, ...]]]] = {}
    for number in range(len(plan.units)):
        record = bench.unit(plan, number)
        for share in record.shares if record else ():
            found.setdefault(share.stretch.name, []).append((share.stretch, share.blocks))
    return found


def _moment(bench: Workbench, path: Path) -> int:
    found = bench.files.find(path)
    return found.modified_ns if found else 0


def _was_touched(path: Path, since_ns: int) -> bool:
    # The same instant counts as later: clocks of file systems are coarse.
    return path.exists() and path.stat().st_mtime_ns >= since_ns


def _blocks(path: Path, stretch: Stretch) -> tuple[str, ...]:
    with storage_errors("read", path), path.open("rb") as file:
        file.seek(stretch.first)
        chunks = iter(lambda: file.read(min(BLOCK_BYTES, stretch.last - file.tell())), b"")
        return tuple(block.hex() for block in digest_of(chunks).blocks)
