"""Where two checkpoints differ, from their manifests alone: by tensor where both name tensors, else by part."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from unbroken.store.manifest import Manifest, Part, Tensor
from unbroken.store.names import SEALED

T = TypeVar("T")


@dataclass(frozen=True)
class CheckpointDifference:
    """What is the same, what differs and how, and what only one of the two has.

    ``unit`` is what was compared: ``tensor``, ``part``, or ``item`` where it was tensors and the parts without any.
    """

    unit: str
    same: int
    differ: tuple[tuple[str, str], ...]
    only_first: tuple[str, ...]
    only_second: tuple[str, ...]

    @property
    def is_same(self) -> bool:
        """Whether nothing differs."""
        return not (self.differ or self.only_first or self.only_second)


def compare(first: Manifest, second: Manifest) -> CheckpointDifference:
    """Compare two manifests; the order of writing, the clock and the job do not count.

    A sealed folder's tensors are those of its safetensors files; its other files are compared as the parts they are.
    """
    if not (first.tensors and second.tensors):
        return _compare("part", _parts(first), _parts(second), _part_change)
    found = _compare("tensor", first.tensors, second.tensors, _tensor_change)
    if SEALED not in (first.kind, second.kind):
        return found
    rest = _compare("part", _untold_parts(first), _untold_parts(second), _part_change)
    return CheckpointDifference(
        "item",
        found.same + rest.same,
        found.differ + rest.differ,
        found.only_first + rest.only_first,
        found.only_second + rest.only_second,
    )


def _parts(manifest: Manifest) -> dict[str, Part]:
    return {part.name: part for part in manifest.parts}


def _untold_parts(manifest: Manifest) -> dict[str, Part]:
    return {name: part for name, part in _parts(manifest).items() if not name.endswith(".safetensors")}


def _compare(
    unit: str, first: Mapping[str, T], second: Mapping[str, T], change: Callable[[T, T], str | None]
) -> CheckpointDifference:
    shared = sorted(first.keys() & second.keys())
    differ = tuple((name, how) for name in shared if (how := change(first[name], second[name])))
    return CheckpointDifference(
        unit,
        len(shared) - len(differ),
        differ,
        tuple(sorted(first.keys() - second.keys())),
        tuple(sorted(second.keys() - first.keys())),
    )


def _tensor_change(first: Tensor, second: Tensor) -> str | None:
    if first.shape != second.shape:
        return f"shape {'x'.join(map(str, first.shape))} and {'x'.join(map(str, second.shape))}"
    if first.dtype != second.dtype:
        return f"type {first.dtype} and {second.dtype}"
    return None if first.digest == second.digest else "other bytes"


def _part_change(first: Part, second: Part) -> str | None:
    if first.size_bytes != second.size_bytes:
        return f"{first.size_bytes:,} and {second.size_bytes:,} bytes"
    if first.digest.whole == second.digest.whole:
        return None
    pairs = zip(first.digest.blocks, second.digest.blocks, strict=False)
    changed = sum(a != b for a, b in pairs)
    return f"{changed} of {len(first.digest.blocks)} blocks differ"
