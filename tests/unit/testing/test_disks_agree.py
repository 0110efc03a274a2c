"""Random sequences of operations on the machine's disk and on the one in memory give the same answers and trees."""

import itertools
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from unbroken.disk import Disk, LocalDisk, NodeKind
from unbroken.testing import MemoryDisk, tree

Step = Callable[[Disk, Path, dict[str, int]], object]

_NAMES = st.sampled_from(["a", "b", "c", "d"])
_PATHS = st.lists(_NAMES | st.just(".."), min_size=0, max_size=2).flatmap(
    lambda above: _NAMES.map(lambda last: "/".join(["top", *above, last]))
)
_TARGETS = st.sampled_from(["a", "b", "c/d", "../b", "..", ".", "/nowhere", "a/../c", "d/"])
_SLOTS = st.sampled_from(["x", "y"])
# The kernel follows 40 links at most, and each of ours climbs one directory at most: from this deep down no sequence
# of operations gets out of the temporary directory.
_WAY_DOWN = "/".join(["n"] * 45)


def _create(slot: str, path: str, content: bytes) -> Step:
    def step(disk: Disk, root: Path, handles: dict[str, int]) -> object:
        handle = disk.create(root / path)
        handles[slot] = handle
        return disk.write(handle, memoryview(content))

    return step


def _append(slot: str, path: str, content: bytes) -> Step:
    def step(disk: Disk, root: Path, handles: dict[str, int]) -> object:
        handle = disk.open_append(root / path)
        handles[slot] = handle
        return disk.write(handle, memoryview(content))

    return step


def _open(slot: str, path: str) -> Step:
    def step(disk: Disk, root: Path, handles: dict[str, int]) -> object:
        handles[slot] = disk.open(root / path)
        return None

    return step


def _read(slot: str, offset: int, size: int) -> Step:
    def step(disk: Disk, root: Path, handles: dict[str, int]) -> object:
        buffer = bytearray(size)
        taken = disk.read_at(handles[slot], offset, memoryview(buffer))
        return taken, bytes(buffer)

    return step


def _status(path: str) -> Step:
    def step(disk: Disk, root: Path, handles: dict[str, int]) -> object:
        found = disk.status(root / path)
        # How large a directory is, each file system decides for itself.
        return found.kind, found.size_bytes if found.kind is not NodeKind.DIRECTORY else None

    return step


def _list(path: str) -> Step:
    return lambda disk, root, handles: sorted((n.name, n.kind.value) for n in disk.list_directory(root / path))


_STEPS: st.SearchStrategy[tuple[str, Step]] = st.one_of(
    _PATHS.map(lambda p: (f"make_directory {p}", lambda d, r, h: d.make_directory(r / p))),
    _PATHS.map(lambda p: (f"unlink {p}", lambda d, r, h: d.unlink(r / p))),
    _PATHS.map(lambda p: (f"remove_directory {p}", lambda d, r, h: d.remove_directory(r / p))),
    _PATHS.map(lambda p: (f"sync_directory {p}", lambda d, r, h: d.sync_directory(r / p))),
    _PATHS.map(lambda p: (f"read_link {p}", lambda d, r, h: d.read_link(r / p))),
    _PATHS.map(lambda p: (f"space {p}", lambda d, r, h: bool(d.space(r / p)))),
    _PATHS.map(lambda p: (f"status {p}", _status(p))),
    _PATHS.map(lambda p: (f"list_directory {p}", _list(p))),
    st.tuples(_PATHS, _PATHS).map(lambda p: (f"rename {p}", lambda d, r, h: d.rename(r / p[0], r / p[1]))),
    st.tuples(_PATHS, _PATHS).map(lambda p: (f"link {p}", lambda d, r, h: d.link(r / p[0], r / p[1]))),
    st.tuples(_TARGETS, _PATHS).map(lambda p: (f"symlink {p}", lambda d, r, h: d.make_symlink(p[0], r / p[1]))),
    st.tuples(_SLOTS, _PATHS, st.binary(max_size=9)).map(lambda p: (f"create {p}", _create(*p))),
    st.tuples(_SLOTS, _PATHS, st.binary(max_size=9)).map(lambda p: (f"append {p}", _append(*p))),
    st.tuples(_SLOTS, _PATHS).map(lambda p: (f"open {p}", _open(*p))),
    st.tuples(_SLOTS, st.binary(max_size=9)).map(
        lambda p: (f"write {p}", lambda d, r, h: d.write(h[p[0]], memoryview(p[1])))
    ),
    st.tuples(_SLOTS, st.integers(0, 12), st.integers(0, 12)).map(lambda p: (f"read_at {p}", _read(*p))),
    _SLOTS.map(lambda s: (f"sync_file {s}", lambda d, r, h: d.sync_file(h[s]))),
    _SLOTS.map(lambda s: (f"close {s}", lambda d, r, h: d.close(h.pop(s)))),
)


def _answer(step: Step, disk: Disk, root: Path, handles: dict[str, int]) -> object:
    before = dict(handles)
    try:
        return step(disk, root, handles)
    except OSError as refusal:
        return type(refusal).__name__, refusal.errno
    except KeyError:
        return "no such handle"
    finally:
        for slot, handle in before.items():
            if handles.get(slot, handle) != handle:
                disk.close(handle)


@settings(max_examples=300, deadline=None)
@given(st.lists(_STEPS, max_size=40))
def test_the_disk_in_memory_answers_every_sequence_of_operations_as_the_kernel_does(
    steps: list[tuple[str, Step]],
) -> None:
    temporary = Path(tempfile.mkdtemp())
    root = temporary / _WAY_DOWN
    root.mkdir(parents=True)
    local, memory = LocalDisk(), MemoryDisk([root])
    local_handles: dict[str, int] = {}
    memory_handles: dict[str, int] = {}
    try:
        for disk in (local, memory):
            for path in (root / "top", root / "top" / "a"):
                disk.make_directory(path)
        for number, (words, step) in zip(itertools.count(), steps, strict=False):
            said = _answer(step, local, root, local_handles)
            assert _answer(step, memory, root, memory_handles) == said, f"step {number}: {words}"
        assert tree(memory, temporary) == tree(local, temporary)
    finally:
        for handle in local_handles.values():
            local.close(handle)
        shutil.rmtree(temporary)
