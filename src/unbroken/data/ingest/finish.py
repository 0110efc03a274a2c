"""The end of a tokenization: every folder's shards are listed, and what was made from what is recorded.

Everything here is made from the units' records, and doing it twice gives the same: a kill between two of its writes is
answered by doing it again.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from unbroken.data.corpus.listing import LISTING, BakedWindows, Listing, SourceRecord, read_listing, write_listing
from unbroken.data.corpus.shards import BIN_SUFFIX, IDX_SUFFIX, ShardRecord
from unbroken.data.ingest.workbench import Finished, Plan, SourceShare, Totals, UnitRecord, Workbench
from unbroken.errors import DataDamaged
from unbroken.store.digest import PartDigest


def finish(bench: Workbench, plan: Plan, records: Sequence[UnitRecord], before: Finished | None) -> Finished:
    """List the shards of every folder, record that it is done, take the plan away.

    Raises:
        ShardDamaged: a list that is there already does not prove itself.
        StorageFailed: the system refused.
    """
    if before is not None and all(source.name in before.sources for source in plan.sources):
        # A kill came between the last record and the plan's removal.
        bench.clear()
        return before
    shares = _by_source(records)
    digests = {name: _whole(parts) for name, parts in shares.items()}
    for target, shards in _by_target(records).items():
        # crash here: some folders have their new list, some not yet; the plan is there, so nobody reads any.
        _list(bench, plan, bench.output / target, shards, _source_records(target, shares, digests, records))
    finished = _finished(plan, records, digests, before)
    bench.finish(finished)
    return finished


def require_present(bench: Workbench, finished: Finished, targets: Sequence[str]) -> None:
    """Pass if all shards that were listed are still there, with their sizes.

    Raises:
        DataDamaged: some are not.
        ShardDamaged: a list does not prove itself.
        StorageFailed: the system refused.
    """
    findings = [
        finding
        for target in targets
        if bench.files.find(bench.output / target / LISTING) is not None
        for finding in _missing(bench, bench.output / target)
    ]
    listed = any(bench.files.find(bench.output / target / LISTING) is not None for target in targets)
    if not listed and finished.totals.shards:
        findings.append(f"{LISTING}: no folder has one, and {finished.totals.shards} shards were listed")
    if findings:
        raise DataDamaged(path=bench.output, findings=tuple(findings))


def _missing(bench: Workbench, folder: Path) -> list[str]:
    sizes = [
        (folder / f"{shard.name}{suffix}", size)
        for shard in read_listing(folder / LISTING, bench.files).shards
        for suffix, size in ((BIN_SUFFIX, shard.bin_bytes), (IDX_SUFFIX, shard.idx_bytes))
    ]
    found = [(path, size, bench.files.find(path)) for path, size in sizes]
    return [
        f"{path.relative_to(bench.output)}: "
        + ("is missing" if status is None else f"has not the {size:,} bytes it had")
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
    """A file's size and digest, from those of its stretches: they are cut where the digest's blocks are."""
    size_bytes = sum(share.stretch.last - share.stretch.first for share in shares)
    blocks = tuple(bytes.fromhex(block) for share in shares for block in share.blocks)
    return size_bytes, PartDigest(size_bytes, blocks).whole


def _source_records(
    target: str,
    shares: Mapping[str, Sequence[SourceShare]],
    digests: Mapping[str, tuple[int, str]],
    records: Sequence[UnitRecord],
) -> list[SourceRecord]:
    """What each file gave to one folder; what was left out of it is said once, in the first."""
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
    bench: Workbench, plan: Plan, folder: Path, shards: Sequence[ShardRecord], sources: Sequence[SourceRecord]
) -> None:
    has_list = bench.files.find(folder / LISTING) is not None
    before = read_listing(folder / LISTING, bench.files) if has_list else Listing((), plan.tokenizer)
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
    write_listing(bench.files, folder, listing)


def _finished(
    plan: Plan, records: Sequence[UnitRecord], digests: Mapping[str, tuple[int, str]], before: Finished | None
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
