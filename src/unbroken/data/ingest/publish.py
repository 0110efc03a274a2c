"""Publish a finished tokenization: name the shards, list those of every folder, and record what they were made from.

Everything is computed from the records of the units and idempotent: after a kill it is simply done again. One process
does it; ``fence`` raises if another has taken over from it, and is called last before every change that would matter.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from unbroken.data.corpus.listing import LISTING, BakedWindows, Listing, SourceRecord, read_listing, write_listing
from unbroken.data.corpus.shards import BIN_SUFFIX, IDX_SUFFIX, SCRATCH_PREFIX, ShardRecord
from unbroken.data.ingest.tokenize_unit import DRAFT_PREFIX, draft_name
from unbroken.data.ingest.work_folder import Finished, SourceShare, TokenizePlan, Totals, UnitRecord, WorkFolder
from unbroken.errors import DataDamaged, StorageFailed
from unbroken.store.digest import PartDigest

Fence = Callable[[], None]


def name_shards(work: WorkFolder, records: Sequence[UnitRecord]) -> list[int]:
    """Give the recorded drafts their final names; returns the units of which a shard is missing.

    Raises:
        StorageFailed: an I/O error.
    """
    present = {target: _names(work, work.output / target) for target in _by_target(records)}
    return [number for number, record in enumerate(records) if not _is_named(work, record, present)]


def _is_named(work: WorkFolder, record: UnitRecord, present: Mapping[str, frozenset[str]]) -> bool:
    for target, shards in record.shards.items():
        for shard in shards:
            for suffix, size_bytes in ((BIN_SUFFIX, shard.bin_bytes), (IDX_SUFFIX, shard.idx_bytes)):
                final = work.output / target / f"{shard.name}{suffix}"
                draft = final.with_name(draft_name(record.attempt, final.name))
                if draft.name in present[target]:
                    _move(work, draft, final)
                elif (found := work.files.find(final)) is None or found.size_bytes != size_bytes:
                    return False
    return True


def _move(work: WorkFolder, draft: Path, final: Path) -> None:
    try:
        # crash here: some shards have their names, some not; the plan exists, so readers reject all of them.
        work.files.publish(draft, final)
    except StorageFailed:
        # A process that was taken for dead may have moved it meanwhile.
        if work.files.find(draft) is not None or work.files.find(final) is None:
            raise


def _names(work: WorkFolder, folder: Path) -> frozenset[str]:
    return frozenset(node.name for node in work.files.list_present(folder))


def finish(
    work: WorkFolder,
    plan: TokenizePlan,
    records: Sequence[UnitRecord],
    before: Finished | None,
    targets: Iterable[str],
    *,
    by: str,
    fence: Fence,
) -> Finished:
    """List the shards of every folder, record the end, remove leftovers and the plan.

    ``targets`` are the folders that may have shards.

    Raises:
        ShardDamaged: an existing list is damaged.
        StorageFailed: an I/O error.
    """
    shares = _by_source(records)
    digests = {name: _whole(parts) for name, parts in shares.items()}
    for target, shards in _by_target(records).items():
        fence()
        sources = _source_records(target, shares, digests, records)
        # crash here: some folders have their new list, some not; the plan exists, so readers reject all of them.
        _list(work, plan, work.output / target, shards, sources, by=by)
    finished = _finished(plan, records, digests, before)
    fence()
    work.finish(finished, by=by)
    end(work, targets, fence=fence)
    return finished


def end(work: WorkFolder, targets: Iterable[str], *, fence: Fence) -> None:
    """Remove leftovers and the plan of a tokenization that has its final record.

    Not before: until then the drafts of every record may be needed.

    Raises:
        StorageFailed: an I/O error.
    """
    for target in dict.fromkeys(("", *targets)):
        fence()
        # Of processes that were killed, or were not the first to finish a unit.
        left = [name for name in _names(work, work.output / target) if name.startswith((SCRATCH_PREFIX, DRAFT_PREFIX))]
        for name in sorted(left):
            # crash here: fewer leftovers; the plan exists, so that the rest is removed next time.
            work.files.remove_file(work.output / target / name)
        if left:
            # A power cut after the plan is removed must not bring them back.
            work.files.sync_directory(work.output / target)
    fence()
    work.clear()


def require_present(work: WorkFolder, finished: Finished, targets: Sequence[str]) -> None:
    """Raise unless all listed shards still exist with their sizes.

    Raises:
        DataDamaged: some are missing or have another size.
        ShardDamaged: a list is damaged.
        StorageFailed: an I/O error.
    """
    findings = [
        finding
        for target in targets
        if work.files.find(work.output / target / LISTING) is not None
        for finding in _missing(work, work.output / target)
    ]
    listed = any(work.files.find(work.output / target / LISTING) is not None for target in targets)
    if not listed and finished.totals.shards:
        findings.append(f"{LISTING}: missing in every folder; {finished.totals.shards} shards were listed")
    if findings:
        raise DataDamaged(path=work.output, findings=tuple(findings))


def _missing(work: WorkFolder, folder: Path) -> list[str]:
    sizes = [
        (folder / f"{shard.name}{suffix}", size)
        for shard in read_listing(folder / LISTING, work.files).shards
        for suffix, size in ((BIN_SUFFIX, shard.bin_bytes), (IDX_SUFFIX, shard.idx_bytes))
    ]
    found = [(path, size, work.files.find(path)) for path, size in sizes]
    return [
        f"{path.relative_to(work.output)}: "
        + ("is missing" if status is None else f"its size is no longer {size:,} bytes")
        for path, size, status in found
        if status is None or status.size_bytes != size
    ]


def _by_target(records: Sequence[UnitRecord]) -> dict[str, list[ShardRecord]]:
    found: dict[str, list[ShardRecord]] = {}
    for record in records:
        for target, shards in record.shards.items():
            if shards:
                found.setdefault(target, []).extend(shards)
    return found


def _by_source(records: Sequence[UnitRecord]) -> dict[str, list[SourceShare]]:
    found: dict[str, list[SourceShare]] = {}
    for record in records:
        for share in record.shares:
            found.setdefault(share.stretch.name, []).append(share)
    return {name: sorted(found[name], key=lambda share: share.stretch.first) for name in sorted(found)}


def _whole(shares: Sequence[SourceShare]) -> tuple[int, str]:
    """Size and digest of a file from those of its byte ranges, which are cut at the digest's blocks."""
    size_bytes = sum(share.stretch.last - share.stretch.first for share in shares)
    blocks = tuple(bytes.fromhex(block) for share in shares for block in share.blocks)
    return size_bytes, PartDigest(size_bytes, blocks).whole


def _source_records(
    target: str,
    shares: Mapping[str, Sequence[SourceShare]],
    digests: Mapping[str, tuple[int, str]],
    records: Sequence[UnitRecord],
) -> list[SourceRecord]:
    """The contribution of each file to one folder; skipped documents are counted in the first folder only."""
    targets = {share.stretch.name: list(record.shards) for record in records for share in record.shares}
    return [
        SourceRecord(
            name=name,
            size_bytes=digests[name][0],
            digest=digests[name][1],
            documents=sum(part.documents.get(target, 0) for part in parts),
            tokens=sum(part.tokens.get(target, 0) for part in parts),
            skipped=dict(_skipped(parts)) if targets[name][0] == target else {},
        )
        for name, parts in shares.items()
        if target in targets[name]
    ]


def _skipped(shares: Sequence[SourceShare]) -> Counter[str]:
    counted: Counter[str] = Counter()
    for share in shares:
        counted.update(share.skipped)
    return counted


def _list(
    work: WorkFolder,
    plan: TokenizePlan,
    folder: Path,
    shards: Sequence[ShardRecord],
    sources: Sequence[SourceRecord],
    *,
    by: str,
) -> None:
    has_list = work.files.find(folder / LISTING) is not None
    before = read_listing(folder / LISTING, work.files) if has_list else Listing((), plan.tokenizer)
    options = plan.options
    baked = None if options.max_length is None else BakedWindows(options.max_length, options.overlap_size or 0)
    merged_shards = {shard.name: shard for shard in (*before.shards, *shards)}
    merged_sources = {source.name: source for source in (*before.sources, *sources)}
    listing = Listing(
        shards=tuple(merged_shards[name] for name in sorted(merged_shards)),
        tokenizer=plan.tokenizer,
        baked=baked,
        sources=tuple(merged_sources[name] for name in sorted(merged_sources)),
    )
    write_listing(work.files, folder, listing, by=by)


def _finished(
    plan: TokenizePlan, records: Sequence[UnitRecord], digests: Mapping[str, tuple[int, str]], before: Finished | None
) -> Finished:
    shares = [share for record in records for share in record.shares]
    old = before.totals if before else Totals()
    units = dict(before.units) if before else {}
    for unit in plan.units:
        units[unit.folder] = max(units.get(unit.folder, 0), unit.number + 1)
    return Finished(
        options=plan.options,
        tokenizer=plan.tokenizer,
        sources={**(before.sources if before else {}), **digests},
        units=units,
        totals=Totals(
            documents=old.documents + sum(sum(share.documents.values()) for share in shares),
            tokens=old.tokens + sum(sum(share.tokens.values()) for share in shares),
            shards=old.shards + sum(len(shards) for record in records for shards in record.shards.values()),
            skipped=dict(sorted((Counter(old.skipped) + _skipped(shares)).items())),
        ),
    )
