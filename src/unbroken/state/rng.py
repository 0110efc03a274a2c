"""Random number generators, saved and restored exactly: the global ones of a process, and those a script makes itself.

The global ones are python's, numpy's and torch's, on the CPU and on the rank's devices.
"""

import ctypes
import functools
import random
import struct
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch

from unbroken.store.fields import Malformed

_NAMES = frozenset({"python", "torch", "cuda"})
# A Mersenne twister: 624 words and a position.
_TWISTER_BYTES: Final = 625 * 4
_ENOUGH_BYTES: Final = 16 * 4


def capture_rng(devices: Iterable[torch.device | str | int] = ()) -> dict[str, object]:
    """The states of the global generators; ``encode`` can store them, and drawing on changes none of them.

    Args:
        devices: the CUDA devices of this rank.
    """
    state: dict[str, object] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    # Loading numpy here would only capture a generator that was never drawn from.
    if (numpy := sys.modules.get("numpy")) is not None:
        state["numpy"] = numpy.random.get_state(legacy=False)
    # By position: the same rank may be given another device in its next job.
    state["cuda"] = [torch.cuda.get_rng_state(device) for device in devices]
    return state


def restore_rng(state: object, devices: Iterable[torch.device | str | int] | None = None) -> None:
    """Set the global generators to what ``capture_rng`` found.

    Args:
        state: what was found.
        devices: the CUDA devices of this rank; the k-th gets the state of the k-th. Where none are named, one state
            goes to the current device, several to the devices from 0 on.

    Raises:
        Malformed: it is not such a state, or of another number of devices; no generator was changed then.
    """
    if not isinstance(state, dict) or state.keys() - {"numpy"} != _NAMES or not isinstance(state["cuda"], list):
        raise Malformed("it is not an RNG state")
    saved = len(state["cuda"])
    targets = _usual_devices(saved) if devices is None else list(devices)
    if len(targets) != saved:
        raise Malformed(f"the generators of {saved} CUDA devices were saved; {len(targets)} are here")
    before = capture_rng(targets)
    try:
        _set(state, targets)
    except (TypeError, ValueError, RuntimeError, LookupError) as refused:
        _set(before, targets)
        raise Malformed(f"a generator does not take its state: {refused}") from refused


def _usual_devices(count: int) -> list[torch.device | str | int]:
    if not torch.cuda.is_available():
        return []
    return [torch.cuda.current_device()] if count == 1 else list(range(min(count, torch.cuda.device_count())))


def _set(state: dict[str, Any], devices: list[torch.device | str | int]) -> None:
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if "numpy" in state:
        import numpy

        numpy.random.set_state(state["numpy"])
    for device, held in zip(devices, state["cuda"], strict=True):
        torch.cuda.set_rng_state(held, device)


def rng_devices() -> list[int]:
    """The CUDA devices whose generators a rank draws from: its own, once it has used it."""
    return [torch.cuda.current_device()] if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]


# ---- a quick look, for every step ----


class RngGlance(NamedTuple):
    """The global generators at one moment, read in about a tenth of the time of ``capture_rng``.

    ``python``: the memory of the twister, or the whole state where that cannot be read. ``numpy``: only to see whether
    it moved. Made of what ``glance_at_rng`` returns, where it is needed.
    """

    python: bytes | tuple[Any, ...]
    gauss_next: float | None
    torch: torch.Tensor
    cuda: list[torch.Tensor]
    numpy: bytes | None

    def state(self) -> dict[str, object]:
        """What ``capture_rng`` would have found then, without numpy's."""
        python = _expanded(self.python, self.gauss_next) if isinstance(self.python, bytes) else self.python
        return {"python": python, "torch": self.torch, "cuda": self.cuda}


# The fields of a ``RngGlance``: a plain tuple is made in a fifth of its time, and nearly all are never looked at.
Glanced = tuple[bytes | tuple[Any, ...], float | None, torch.Tensor, list[torch.Tensor], bytes | None]


def glance_at_rng() -> Glanced:
    """The global generators as they are now."""
    python: Any = random.getstate.__self__  # type: ignore[attr-defined]
    numpy = sys.modules.get("numpy")
    return (
        _twister(python) if _is_twister_readable() else python.getstate(),
        python.gauss_next,
        torch.default_generator.get_state(),
        [torch.cuda.get_rng_state(device) for device in rng_devices()],
        None if numpy is None else glance_at_numpy(numpy),
    )


def glance_at_numpy(numpy: Any) -> bytes:  # noqa: ANN401 - the module, which may not be there
    """The bits of numpy's global generator: its full state takes 30 times as long to copy."""
    generator = numpy.random.mtrand._rand._bit_generator
    if type(generator).__name__ != "MT19937":
        return repr(generator.state).encode()
    seen = _SEEN.get(id(generator))
    # Its position comes last.
    return bytes((seen or _seen(generator, generator.ctypes.state_address, _TWISTER_BYTES - _ENOUGH_BYTES)).enough)


class _Enough(ctypes.Structure):
    """The position of a twister and 15 of its words: they show whether it moved.

    Each draw moves the position, and all words change before it is where it was.
    """

    _fields_ = (("bytes", ctypes.c_ubyte * _ENOUGH_BYTES),)


class _Memory(ctypes.Structure):
    """The memory of a twister."""

    _fields_ = (("bytes", ctypes.c_ubyte * _TWISTER_BYTES),)


@dataclass(slots=True)
class _Seen:
    """A generator that was read, kept alive with its memory, and what was found when it had moved."""

    generator: object
    enough: _Enough
    memory: _Memory
    before: bytes = b""
    copy: bytes = b""


# The last generators that were read; they are read at every step.
_SEEN: Final[dict[int, _Seen]] = {}
_MOST_SEEN: Final = 8


def _seen(generator: object, address: int, offset: int) -> _Seen:
    if len(_SEEN) >= _MOST_SEEN:
        _SEEN.clear()
    seen = _Seen(generator, _Enough.from_address(address + offset), _Memory.from_address(address))
    _SEEN[id(generator)] = seen
    return seen


def _twister(rng: random.Random) -> bytes:
    """The memory of python's generator: ``getstate`` makes 625 numbers of it, and freeing those takes as long again."""
    # Its position comes first.
    seen = _SEEN.get(id(rng)) or _seen(rng, id(rng) + object.__basicsize__, 0)
    if (now := bytes(seen.enough)) != seen.before:
        seen.before, seen.copy = now, bytes(seen.memory)
    return seen.copy


def _expanded(memory: bytes, gauss_next: float | None) -> tuple[Any, ...]:
    index, *words = struct.unpack("=i624I", memory)
    return random.Random.VERSION, (*words, index), gauss_next


@functools.cache
def _is_twister_readable() -> bool:
    """Whether this Python has the twister where CPython has always had it: right behind the head of the object."""
    base = random.Random.__mro__[1]
    if sys.implementation.name != "cpython" or base.__basicsize__ < object.__basicsize__ + _TWISTER_BYTES:
        return False
    rng = random.Random(7)  # noqa: S311 -- no secret
    rng.gauss(0, 1)
    return _expanded(_twister(rng), rng.gauss_next) == rng.getstate()  # type: ignore[attr-defined]


# ---- the script's own generators ----


def kinds_of_rng() -> tuple[type[Any], ...]:
    """The types of generators that have a state; numpy's only where numpy is loaded."""
    numpy = sys.modules.get("numpy")
    others = () if numpy is None else (numpy.random.Generator, numpy.random.RandomState, numpy.random.BitGenerator)
    return (torch.Generator, random.Random, *others)


def is_rng(thing: object) -> bool:
    """Whether an object is a generator with a state; the system's source of randomness has none."""
    # type(), not isinstance(): a proxy may lie about its class, or raise when it is inspected.
    return issubclass(type(thing), kinds_of_rng()) and not issubclass(type(thing), random.SystemRandom)


def rng_state(rng: Any) -> object:  # noqa: ANN401 - one of four libraries' types
    """The state of a generator, of which drawing on changes nothing."""
    if isinstance(rng, torch.Generator):
        return rng.get_state()
    if isinstance(rng, random.Random):
        return rng.getstate()
    if hasattr(rng, "bit_generator"):
        return rng.bit_generator.state
    return rng.get_state(legacy=False) if hasattr(rng, "get_state") else rng.state


def set_rng_state(rng: Any, state: Any) -> None:  # noqa: ANN401
    """Put a generator where it was: its next draw is the one that would have come.

    Raises:
        Malformed: the state is of another kind of generator.
    """
    try:
        if isinstance(rng, torch.Generator):
            rng.set_state(state)
        elif isinstance(rng, random.Random):
            rng.setstate(state)
        elif hasattr(rng, "bit_generator"):
            rng.bit_generator.state = state
        elif hasattr(rng, "set_state"):
            rng.set_state(state)
        else:
            rng.state = state
    except (TypeError, ValueError, RuntimeError, LookupError) as refused:
        raise Malformed(f"a {type(rng).__name__} does not take the saved RNG state: {refused}") from refused


def comparable(state: object) -> object:
    """A generator's state in a form that ``==`` compares, whatever library's it is."""
    if isinstance(state, torch.Tensor):
        return state.cpu().numpy().tobytes()
    if isinstance(state, dict):
        return {key: comparable(value) for key, value in state.items()}
    return state.tobytes() if hasattr(state, "tobytes") else state


class OwnRng:
    """A generator with the methods of an item."""

    def __init__(self, rng: object) -> None:
        self.rng = rng

    def state_dict(self) -> dict[str, object]:
        """Its kind and state."""
        return {"type": self._type, "state": rng_state(self.rng)}

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Put it where it was.

        Raises:
            Malformed: the state is not one of such a generator.
        """
        set_rng_state(self.rng, state["state"])

    def complaint(self, state: object) -> str | None:
        """Why the state of a checkpoint is not one of this generator; None where it is."""
        saved = state.get("type") if isinstance(state, dict) else None
        return None if saved == self._type else f"an RNG state of {saved} in the checkpoint, {self._type} here"

    @property
    def _type(self) -> str:
        # numpy's Generator draws from one of several algorithms, each with states of its own.
        inner = getattr(self.rng, "bit_generator", None)
        name = type(self.rng).__name__
        return name if inner is None else f"{name}({type(inner).__name__})"
