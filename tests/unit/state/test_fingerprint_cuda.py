import pytest
import torch

from unbroken.state import mixing
from unbroken.state.fingerprint import contribution, fingerprints
from unbroken.state.mixing import Keys, Passes, Places, add_box, arithmetic
from unbroken.world import World

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64,
    torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
    # Since torch 2.7.
    *([torch.float8_e8m0fnu] if hasattr(torch, "float8_e8m0fnu") else []),
]  # fmt: skip


def sample(dtype: torch.dtype, rows: int, columns: int) -> torch.Tensor:
    """A tensor of random bits."""
    size = torch.empty(0, dtype=dtype).element_size() * rows * columns
    generator = torch.Generator().manual_seed(11)
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (size,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).reshape(rows, columns)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_cuda_gives_the_numbers_of_the_cpu(dtype: torch.dtype) -> None:
    tensors = {"w": sample(dtype, 300, 211), "small": sample(dtype, 1, 1), "empty": sample(dtype, 0, 5)}
    moved = {name: tensor.cuda() for name, tensor in tensors.items()}
    alone = World(0, 1)
    assert fingerprints(moved, alone) == fingerprints(tensors, alone)
    assert contribution("w", moved["w"].t()) == contribution("w", tensors["w"].t())
    parts = [contribution("w", moved["w"], rank=rank, size=3) for rank in range(3)]
    whole = contribution("w", tensors["w"])
    assert [sum(lane) % (1 << 64) for lane in zip(*parts, strict=True)] == [lane % (1 << 64) for lane in whole]


def test_cuda_takes_the_fused_kernel_where_triton_is() -> None:
    pytest.importorskip("triton")
    assert not isinstance(arithmetic(torch.device("cuda", torch.cuda.current_device())), Passes)


@pytest.mark.parametrize("cuts", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("is_fused", [False, True])
def test_cuda_counts_a_box_cut_in_any_number_of_dimensions_as_the_cpu_does(cuts: int, is_fused: bool) -> None:
    whole = (9, 8, 7, 6)
    offsets = [1 if dim < cuts else 0 for dim in range(4)]
    sizes = [length - 3 if dim < cuts else length for dim, length in enumerate(whole)]
    box = torch.arange(9 * 8 * 7 * 6).reshape(whole)[: sizes[0], : sizes[1], : sizes[2], : sizes[3]].float()
    sums = []
    for device in ("cpu", "cuda"):
        total = torch.zeros(2, dtype=torch.int64, device=device)
        add = arithmetic(total.device) if is_fused else Passes(total.device, 100)
        add_box(total, box.to(device), whole=whole, offsets=offsets, keys=Keys(1, 1 << 63), add=add)
        sums.append(total.tolist())
    assert sums[0] == sums[1]


def test_cuda_counts_places_beyond_32_bits_as_the_cpu_does() -> None:
    words = sample(torch.int32, 1, 10_000).reshape(-1)
    places = Places((1 << 32) - 5_000, ((100, 1 << 34),), True)
    sums = []
    for device in ("cpu", "cuda"):
        total = torch.zeros(2, dtype=torch.int64, device=device)
        arithmetic(total.device)(words.to(device), places, Keys(1 << 63, 5), total)
        sums.append(total.tolist())
    assert sums[0] == sums[1]


def test_cuda_hashes_a_tensor_of_more_than_32_bits_of_elements() -> None:
    if torch.cuda.mem_get_info()[0] < 12 << 30:
        pytest.skip("needs 12 GiB of free device memory")
    tensor = torch.zeros((1 << 32) + 4096, dtype=torch.uint8, device="cuda")
    seen = {contribution("w", tensor)}
    for place in (5, (1 << 32) - 1, 1 << 32, (1 << 32) + 5):
        tensor[place] = 1
        seen.add(contribution("w", tensor))
        tensor[place] = 0
    assert len(seen) == 5
    halves = [contribution("w", tensor, rank=rank, size=2) for rank in range(2)]
    whole = contribution("w", tensor)
    assert [sum(lane) % (1 << 64) for lane in zip(*halves, strict=True)] == [lane % (1 << 64) for lane in whole]


def test_cuda_without_triton_falls_back_to_passes_with_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = sample(torch.bfloat16, 1000, 999).cuda()
    expected = contribution("w", tensor)
    monkeypatch.setattr(mixing, "_fused", lambda _device: None)
    assert contribution("w", tensor) == expected
