"""The exact self-test: a tiny model, replicated and sharded, on one rank and on two, must train to the same bits.

``python -m unbroken.exact.self_test`` runs it in a process of its own, which shares neither RNG, flags, process group
nor CUDA context with the process that asks. Torch is imported once; the ranks are forked from there. Two things are
compared. The sum of gradients over the lanes has the same bits on every machine: they are written down here. What a
training step computes depends on the kernels of the machine, so there every layout is compared with one rank that holds
the whole model.
"""

import argparse
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from unbroken.doctor.self_test_process import EXACT, NOT_AVAILABLE, NOT_EXACT, NOT_TESTED, TIMEOUT_VARIABLE
from unbroken.errors import PeerError, UnbrokenError
from unbroken.exact.forked import Forked, collect, in_one_line, world
from unbroken.exact.numerics import set_backends
from unbroken.exact.reducer import Reducer
from unbroken.exact.self_tested import make_key

LAYOUTS: Final = ("replicated", "sharded")
SIZES: Final = (1, 2)
DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Odd, so that on two ranks one has no lane in the last round.
LANES: Final = 5
# Their sum is a power of two: dividing by it rounds nothing.
COUNTS: Final = (1, 1, 2, 2, 2)
STEPS: Final = 2
LIMIT_S: Final = float(os.environ.get(TIMEOUT_VARIABLE, "120"))
_LOOPBACK: Final = "lo"

# ---- sums with known bits ----

ROWS, COLUMNS = 37, 3
# SHA-256 of the sum of the gradients below, as little-endian float32. It follows from the definition of the sum alone.
KNOWN_SUM: Final = "5fe30cc9c1a86d88fa32d28ce6bf96c55c59ef655449cb6af4951e1ef4d13522"


def known_gradients() -> list[list[float]]:
    """For each lane the gradient of every element: numbers that all three dtypes hold exactly.

    Their exponents differ so much that float32 rounds almost every addition: in another order the sum has other bits.
    The first element is -0.0 in all lanes, which adding to a zero would turn into 0.0.
    """
    found, word = [], 1
    for _ in range(LANES):
        lane = [-0.0]
        while len(lane) < ROWS * COLUMNS:
            word = (word * 1_103_515_245 + 12_345) % (1 << 31)
            exponent = (word >> 16) % 6 + (8 if word >> 29 & 1 else -14)
            lane.append((-1.0) ** (word >> 30) * (128 + (word >> 8) % 128) * 2.0 ** (exponent - 7))
        found.append(lane)
    return found


class _Known(nn.Module):
    """Its gradient is its input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(ROWS, COLUMNS))

    def forward(self, gradient: Tensor) -> Tensor:
        return (self.weight * gradient.to(self.weight.dtype)).sum()


def _sum_of_known(layout: str, dtype: torch.dtype, device: torch.device) -> str:
    model = _Known().to(device)
    reducer = Reducer(model, lanes=LANES, seed=0, compute_dtype=_held(model, [model], layout, dtype, device))
    gradients = torch.tensor(known_gradients(), dtype=torch.float32).view(LANES, ROWS, COLUMNS).to(device)
    for lane in reducer.lanes(0):
        loss = model(gradients[lane.number])
        lane.backward(loss, count=COUNTS[lane.number], scaled=loss)
    return digest([_whole(gradient) for gradient in reducer.gradients()])


# ---- a training of a few steps ----

_WIDTH, _HEADS, _INNER, _WORDS, _LENGTH = 16, 2, 21, 13, 6


class _Block(nn.Module):
    """Attention and an MLP, written with operations that are deterministic on every device."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(_WIDTH)
        self.scale = nn.Parameter(torch.ones(_WIDTH))
        self.mixed = nn.Linear(_WIDTH, 3 * _WIDTH)
        self.up = nn.Linear(_WIDTH, _INNER)
        self.down = nn.Linear(_INNER, _WIDTH, bias=False)
        self.dropout = nn.Dropout(0.1)

    def forward(self, hidden: Tensor) -> Tensor:
        batch, length, _ = hidden.shape
        parts = self.mixed(self.norm(hidden)).view(batch, length, 3, _HEADS, -1).permute(2, 0, 3, 1, 4)
        weights = torch.softmax(parts[0] @ parts[1].transpose(-1, -2) * 0.25, dim=-1)
        hidden = hidden + (weights @ parts[2]).transpose(1, 2).reshape(batch, length, _WIDTH)
        # The gradient of this scale is computed in float32, as in norms that are written by hand.
        wide = hidden.float() * torch.rsqrt(hidden.float().square().mean(-1, keepdim=True) + 1e-5)
        scaled = (wide * self.scale.float()).to(hidden.dtype)
        added: Tensor = self.dropout(self.down(F.gelu(self.up(scaled))))
        return hidden + added


class _Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(_WORDS, _WIDTH)
        self.block = _Block()
        self.out = nn.Linear(_WIDTH, _WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.out(self.block(self.words(tokens)))
        return F.cross_entropy(logits[:, :-1].float().flatten(0, 1), tokens[:, 1:].flatten())


def _train(layout: str, dtype: torch.dtype, device: torch.device) -> str:
    torch.manual_seed(1)
    model = _Tiny().to(device)
    compute_dtype = _held(model, [model.block, model], layout, dtype, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    reducer = Reducer(model, optimizer, lanes=LANES, seed=2, compute_dtype=compute_dtype)
    numbers: list[Tensor] = []
    for step in range(STEPS):
        for lane in reducer.lanes(step):
            generator = torch.Generator().manual_seed(100 * step + lane.number)
            loss = model(torch.randint(_WORDS, (2, _LENGTH), generator=generator).to(device))
            lane.backward(loss, scaled=loss)
        numbers += [reducer.losses, reducer.clip(0.5)]
        optimizer.step()
    moments = [optimizer.state[each][name] for each in model.parameters() for name in ("exp_avg", "exp_avg_sq")]
    return digest([*numbers, *map(_whole, model.parameters()), *map(_whole, moments)])


# ---- how a model is held ----


def _held(
    model: nn.Module, parts: Sequence[nn.Module], layout: str, dtype: torch.dtype, device: torch.device
) -> torch.dtype | None:
    """Shard the model if it is to be; returns the dtype that the reducer of a replicated one computes in."""
    low = None if dtype is torch.float32 else dtype
    if layout == "replicated":
        return low
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for part in parts:
        sharded = fully_shard(part, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=low))
        if device.type == "cuda":
            _share_device(sharded)
    return None


def _share_device(sharded: FSDPModule) -> None:
    # Imported here: an older torch has no such hook.
    from unbroken.exact.exchange import StagedAllGather

    staged: Any = StagedAllGather()
    sharded.set_custom_all_gather(staged)


def _whole(tensor: Tensor) -> Tensor:
    """The whole of a tensor on the CPU, gathered through host memory."""
    if not isinstance(tensor, DTensor):
        return tensor.detach().cpu()
    local, size = tensor.to_local().detach().cpu(), dist.get_world_size()
    rows = -(-tensor.shape[0] // size)
    padded = torch.zeros(rows, *tensor.shape[1:], dtype=local.dtype)
    padded[: local.shape[0]] = local
    parts = [torch.empty_like(padded) for _ in range(size)]
    dist.all_gather(parts, padded)
    return torch.cat(parts)[: tensor.shape[0]]


def digest(tensors: Iterable[Tensor]) -> str:
    """SHA-256 of the bytes of tensors, one after the other."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


# ---- the cases of one rank, and the verdict on all ranks ----


def run_cases(device: torch.device) -> dict[str, dict[str, str]]:
    """Every layout in every precision on the ranks of this world: the digests of the sum and of the training."""
    # Not by use_deterministic_algorithms: that imports inductor, which nothing here needs, in every rank.
    torch.set_deterministic_debug_mode("error")
    set_backends()
    if device.type == "cuda":
        torch.cuda.init()  # type: ignore[no-untyped-call]
        torch.cuda.set_device(device)
    return {f"{layout} {dtype}": _run_case(layout, dtype, device) for dtype in DTYPES for layout in LAYOUTS}


def _run_case(layout: str, dtype: str, device: torch.device) -> dict[str, str]:
    if (lacks := _lacks(dtype, device)) is not None:
        return {"lacks": lacks}
    try:
        return {
            "sum": _sum_of_known(layout, DTYPES[dtype], device),
            "bits": _train(layout, DTYPES[dtype], device),
        }
    except Exception as error:  # noqa: BLE001 - whatever this torch raises: the other cases are still of interest
        said = in_one_line(error)
        return {"lacks" if _is_lacking(error, said) else "error": said}


def _is_lacking(error: Exception, said: str) -> bool:
    """Whether this torch cannot do it at all; anything else may work the next time."""
    if isinstance(error, UnbrokenError):
        return not isinstance(error, PeerError)
    # torch has no class of its own for a kernel that it lacks.
    return isinstance(error, NotImplementedError | ImportError | AttributeError) or "not implemented" in said


def _lacks(dtype: str, device: torch.device) -> str | None:
    if device.type == "cuda" and dtype == "bfloat16" and not torch.cuda.is_bf16_supported(including_emulation=False):
        return "this GPU has no bfloat16"
    return None


def compare(answers: Mapping[int, Sequence[Mapping[str, Mapping[str, str]] | str]]) -> list[dict[str, Any]]:
    """The verdict on every layout and precision.

    Args:
        answers: by world size, what ``run_cases`` returned on each rank, or why a rank did not answer.
    """
    return [_verdict(layout, dtype, answers) for dtype in DTYPES for layout in LAYOUTS]


def _verdict(
    layout: str, dtype: str, answers: Mapping[int, Sequence[Mapping[str, Mapping[str, str]] | str]]
) -> dict[str, Any]:
    reference = _case(answers[1][0], f"replicated {dtype}")
    found: dict[str, list[str]] = {NOT_EXACT: [], NOT_TESTED: [], NOT_AVAILABLE: []}
    for size, ranks in answers.items():
        where = f"on {size} rank{'s' if size > 1 else ''}"
        for answer in ranks:
            case = _case(answer, f"{layout} {dtype}")
            if "error" in case:
                found[NOT_TESTED].append(f"{where}: {case['error']}")
            elif "lacks" in case:
                found[NOT_AVAILABLE].append(f"{where}: {case['lacks']}")
            elif case["sum"] != KNOWN_SUM:
                found[NOT_EXACT].append(f"{where} the sum of the gradients has other bits than defined")
            elif "bits" not in reference:
                found[NOT_TESTED].append(f"{where}: replicated on 1 rank, with which it is compared, has no result")
            elif case["bits"] != reference["bits"]:
                found[NOT_EXACT].append(f"{where} the training has other bits than replicated on 1 rank")
    verdict = next((verdict for verdict, because in found.items() if because), EXACT)
    return {
        "layout": layout,
        "dtype": dtype,
        "verdict": verdict,
        "because": list(dict.fromkeys(found.get(verdict, []))),
    }


def _case(answer: Mapping[str, Mapping[str, str]] | str, name: str) -> Mapping[str, str]:
    return {"error": answer} if isinstance(answer, str) else answer[name]


# ---- the process ----


def run(device: torch.device, *, with_machine: bool) -> dict[str, Any]:
    """Fork the worlds, wait for them and compare; with the facts about torch and GPUs, if they are asked for."""
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="unbroken-self-test-") as root:
        key = Forked(lambda: make_key(device), limit_s=LIMIT_S)
        worlds = {}
        for size in SIZES:
            folder = Path(root, str(size))
            folder.mkdir()
            cases = lambda _: run_cases(device)  # noqa: E731
            worlds[size] = world(size, cases, folder=folder, limit_s=LIMIT_S, interface=_LOOPBACK)
        machine: list[Forked] = []
        if with_machine:
            # Imported here: only `doctor` asks for it.
            from unbroken.exact.machine_facts import gloo_ranks, torch_facts

            machine = [Forked(torch_facts, limit_s=LIMIT_S), *gloo_ranks(Path(root, "gloo"))]
        collect([key, *(rank for ranks in worlds.values() for rank in ranks), *machine], limit_s=LIMIT_S)
    if key.error is not None:
        raise SystemExit(f"the device cannot be used: {key.error}")
    answers = {size: [rank.error or rank.answer for rank in ranks] for size, ranks in worlds.items()}
    found = {
        "key": key.answer,
        "device": device.type,
        "combinations": compare(answers),
        "took_s": time.monotonic() - started_s,
    }
    if machine:
        found["machine"] = {"torch": machine[0].answer, "torch_error": machine[0].error}
        found["machine"]["gloo_errors"] = [rank.error for rank in machine[1:] if rank.error is not None]
    return found


def _best_device() -> str:
    # Asked in a process of its own: the question alone makes a process unfit for forking.
    asked = Forked(torch.cuda.is_available, limit_s=LIMIT_S)
    collect([asked], limit_s=LIMIT_S)
    return "cuda:0" if asked.answer else "cpu"


def main(argv: Sequence[str] | None = None) -> None:
    """Run the self-test and print its report as one line of JSON; everything else goes to standard error."""
    parser = argparse.ArgumentParser(prog="python -m unbroken.exact.self_test", allow_abbrev=False)
    parser.add_argument("--device", default="auto", help="cpu, cuda:N, or auto for the first GPU if there is one")
    parser.add_argument("--with-machine", action="store_true", help="also torch, its GPUs, and whether gloo connects")
    options = parser.parse_args(argv)
    # Before the first computation: a process with threads cannot be forked, and the ranks share a few cores.
    torch.set_num_threads(1)
    answer = os.dup(1)
    os.dup2(2, 1)
    device = _best_device() if options.device == "auto" else options.device
    report = run(torch.device(device), with_machine=options.with_machine)
    with os.fdopen(answer, "w") as out:
        out.write(json.dumps(report) + "\n")


if __name__ == "__main__":
    main()
