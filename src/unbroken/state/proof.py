"""Whether the bytes that were staged are those that were fingerprinted at the step's edge.

A weight that is written while its copy is still running on a side stream (a clamp, an EMA ``copy_``, a CUDA graph
replay) or by another thread gives a copy that never was the state of any step. The fingerprint of the host copy is
computed in the save's own threads, never in the training thread, and compared before the commit.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from typing import Final

import torch

from unbroken.errors import WrittenDuringSave
from unbroken.state.fingerprint import keys_of, print_of
from unbroken.state.index import DTYPES, Box
from unbroken.state.mixing import WORDS, Passes, Places
from unbroken.state.plan import SavePlan
from unbroken.state.stage import StagedPiece
from unbroken.store.manifest import Tensor

Sums = tuple[int, int]
# Larger than the chunks at an edge: fewer, longer operations leave Python's lock to the training thread.
_CHUNK_WORDS: Final = 1 << 17
_MOST_THREADS: Final = 4


def staged_sums(pieces: Sequence[StagedPiece], plan: SavePlan) -> dict[tuple[str, Box], Sums]:
    """What each staged piece adds to the fingerprint of its tensor, from the bytes in host memory."""
    threads = max(1, min(_MOST_THREADS, (os.cpu_count() or 1) // 4, len(pieces)))
    with ThreadPoolExecutor(threads, thread_name_prefix="unbroken-prove") as pool:
        shares = pool.map(lambda first: list(_sums(pieces[first::threads], plan)), range(threads))
        return {key: sums for share in shares for key, sums in share}


def _sums(pieces: Sequence[StagedPiece], plan: SavePlan) -> Iterator[tuple[tuple[str, Box], Sums]]:
    cpu = torch.device("cpu")
    add = Passes(cpu, _CHUNK_WORDS)
    for staged in pieces:
        name, dtype, box = staged.piece
        whole, itemsize = plan.tensors[name].shape, DTYPES[dtype].itemsize
        width = min(itemsize, 4)
        per_element = itemsize // width
        places = Places.of((*whole, per_element), (*box.offsets, 0), (*box.sizes, per_element))
        total = torch.zeros(2, dtype=torch.int64, device=cpu)
        words = [stretch.view(WORDS[width]) for stretch in staged.stretches]
        begins = accumulate((row.numel() for row in words), initial=0)
        for row, begin in zip(words, begins, strict=False):
            add(row, places, keys_of(name, DTYPES[dtype], whole), total, begin=begin)
        first, second = total.tolist()
        yield (name, box), (first, second)


def require_as_fingerprinted(
    plan: SavePlan,
    described: Mapping[str, Tensor],
    told: Sequence[Mapping[tuple[str, Box], Sums]],
    step: int,
) -> None:
    """Pass if what all ranks staged has the fingerprints that were taken at the edge.

    Raises:
        WrittenDuringSave: some tensors were written in between.
    """
    boxes: dict[str, list[Sums]] = {}
    for sums in told:
        for (name, _), each in sums.items():
            boxes.setdefault(name, []).append(each)
    written = [
        name
        for name, planned in plan.tensors.items()
        # A tied tensor is staged under the first of its names only.
        if planned.same_as == name
        and print_of(name, DTYPES[planned.dtype], planned.shape, boxes.get(name, ())) != described[name].digest
    ]
    if written:
        raise WrittenDuringSave(step=step, names=tuple(sorted(written)))
