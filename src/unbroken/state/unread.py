"""What a restore has no use for, proven all the same: a checkpoint is right in every byte, or is none to go on from.

Other ranks' records after a resize, tensors of things that were not handed over, the description for stock readers.
Nobody would miss them now, but whoever keeps damage today finds it when those bytes are needed.
"""

from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor

from unbroken.state.index import Index
from unbroken.state.read import DEFAULT_THREADS
from unbroken.store.digest import block_ranges
from unbroken.store.manifest import Manifest
from unbroken.store.parts import BlockReader, require_block
from unbroken.store.place import Store
from unbroken.world import World


def prove_unread(
    store: Store, name: str, manifest: Manifest, index: Index, wanted: Collection[str], world: World
) -> None:
    """Read and prove the blocks that hold nothing of the tensors that ranks are about to read. Collective.

    Args:
        store: where the checkpoint is.
        name: what it is called there.
        manifest: its manifest.
        index: its index.
        wanted: the tensors that this rank will read; together the ranks read each of them whole.
        world: the ranks, which share the blocks out.

    Raises:
        DamagedCheckpoint: a block is not what was written.
        StorageFailed: the system refused.
        RankFailed: one of these, on another rank only.
    """
    # All ranks must share out one list: what the first one reads, and what each reads for itself alone.
    told = world.all_gather(tuple(each for each in wanted if world.is_first or each.startswith("ranks.")))
    read = _blocks_of(index, {each for names in told for each in names}, manifest.block_bytes)
    unread = [
        (part.name, start, end, expected)
        for part in manifest.parts
        for (start, end), expected in zip(
            block_ranges(part.size_bytes, manifest.block_bytes), part.digest.blocks, strict=True
        )
        if (part.name, start // manifest.block_bytes) not in read
    ]
    reader = BlockReader(store.files, manifest.block_bytes)

    def prove(block: tuple[str, int, int, bytes]) -> None:
        part, start, end, expected = block
        data = reader.read(store.path(name) / part, start, end)
        require_block(store.path(name), part, (start, end), data, expected)

    def prove_mine() -> None:
        with ThreadPoolExecutor(DEFAULT_THREADS, thread_name_prefix="unbroken-prove") as pool:
            for _ in pool.map(prove, unread[world.rank :: world.size]):
                pass

    world.all_or_none(prove_mine)


def _blocks_of(index: Index, names: Collection[str], block_bytes: int) -> set[tuple[str, int]]:
    """The blocks in which some tensors lie, each as its part's name and its number there."""
    found: set[tuple[str, int]] = set()
    for entry in (index.tensors[name] for name in names if name in index.tensors):
        for chunk in entry.chunks:
            end = chunk.at + chunk.box.elements * entry.dtype.itemsize
            if end > chunk.at:
                found |= {(chunk.part, number) for number in range(chunk.at // block_bytes, -(-end // block_bytes))}
    return found
