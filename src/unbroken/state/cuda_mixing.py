"""The fingerprint's arithmetic as one CUDA kernel: each word is read once, and nothing is written but two sums.

Gives the numbers of ``mixing.Passes``, at the speed of the device's memory. Importing it needs Triton, which torch
brings along for CUDA.
"""

import subprocess

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]

from unbroken.state.mixing import FIRST, PAGE, PAGE_BITS, SECOND, THIRD, Keys, Passes, Places, signed

TILE_WORDS = 4096


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _add_tile(  # type: ignore[no-untyped-def]  # noqa: ANN202
    words,  # noqa: ANN001 - Triton reads these as pointers
    total,  # noqa: ANN001
    count: tl.int64,
    begin: tl.int64,
    start: tl.int64,
    key: tl.int64,
    second_key: tl.int64,
    period_0: tl.int64,
    jump_0: tl.int64,
    period_1: tl.int64,
    jump_1: tl.int64,
    JUMPS: tl.constexpr,  # noqa: N803
    PAGED: tl.constexpr,  # noqa: N803
    C1: tl.constexpr,  # noqa: N803
    C2: tl.constexpr,  # noqa: N803
    C3: tl.constexpr,  # noqa: N803
    PAGE_STEP: tl.constexpr,  # noqa: N803
    TILE: tl.constexpr,  # noqa: N803
):
    own = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = own < count
    word = tl.load(words + own, mask=inside, other=0).to(tl.int64)
    j = begin + own
    place = start + j
    if JUMPS > 0:
        place += (j // period_0) * jump_0
    if JUMPS > 1:
        place += (j // period_1) * jump_1
    if PAGED:
        place += (place >> 32) * PAGE_STEP
    x = ((word << 32) + place + key).to(tl.uint64, bitcast=True)
    x ^= x >> 32
    x *= C1
    x ^= x >> 32
    x *= C2
    x ^= x >> 32
    zero = tl.zeros([TILE], dtype=tl.int64)
    tl.atomic_add(total, tl.sum(tl.where(inside, x.to(tl.int64, bitcast=True), zero)))
    x ^= second_key.to(tl.uint64, bitcast=True)
    x *= C3
    x ^= x >> 32
    tl.atomic_add(total + 1, tl.sum(tl.where(inside, x.to(tl.int64, bitcast=True), zero)))


def add_words(words: torch.Tensor, places: Places, keys: Keys, total: torch.Tensor, *, begin: int = 0) -> None:
    """Add a row of words, the first of which is word ``begin`` of ``places``, to ``total``; all on one CUDA device."""
    if len(places.jumps) > 2:  # a box cut in four dimensions or more
        Passes(words.device)(words, places, keys, total, begin=begin)
        return
    (period_0, jump_0), (period_1, jump_1) = (*places.jumps, (1, 0), (1, 0))[:2]
    with torch.cuda.device(words.device):
        _add_tile[(triton.cdiv(words.numel(), TILE_WORDS),)](
            words,
            total,
            words.numel(),
            begin,
            places.start,
            signed(keys.first),
            signed(keys.second),
            period_0,
            jump_0,
            period_1,
            jump_1,
            JUMPS=len(places.jumps),
            PAGED=places.is_paged,
            C1=FIRST,
            C2=SECOND,
            C3=THIRD,
            PAGE_STEP=signed(PAGE - (1 << PAGE_BITS)),
            TILE=TILE_WORDS,
        )


def is_sound(device: torch.device) -> bool:
    """Whether the kernel can be built for a device and gives the numbers of the passes there."""
    words = torch.arange(-5_000, 5_000, dtype=torch.int32, device=device) * 1_000_003
    places, keys = Places(7, ((10, 90), (1_000, 81_000)), True), Keys(FIRST, SECOND)
    sums = torch.zeros(2, 2, dtype=torch.int64, device=device)
    Passes(device, 1 << 14)(words, places, keys, sums[0])
    try:
        add_words(words[:4_321], places, keys, sums[1])
        add_words(words[4_321:], places, keys, sums[1], begin=4_321)
        return bool((sums[0] == sums[1]).all())
    except (RuntimeError, OSError, subprocess.SubprocessError, triton.TritonError):
        # No C compiler, no writable cache, a GPU that this Triton does not know.
        return False
