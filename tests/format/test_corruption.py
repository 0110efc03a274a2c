"""Every way bytes go bad: found by a full look with the part named, survived by a resume, and nothing deleted."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.unit.store.saving import save, tree
from unbroken.store.check import Level, verify
from unbroken.store.choose import resume_point
from unbroken.store.directory import Store

PAGE = 4096
SIZE = 3 * PAGE + 5
PARTS = ("root.bin", "state/deep.bin")
PLACES = pytest.mark.parametrize("part", PARTS)


def content(step: int, name: str) -> bytes:
    return bytes((step * 31 + len(name) * 7 + i * i) % 253 + 1 for i in range(SIZE))


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three checkpoints, two parts in the root and two below ``state/`` in each."""
    root = tmp_path_factory.mktemp("pristine") / "run" / "checkpoints"
    for step in (1, 2, 3):
        names = (*PARTS, *(f"{name}.twin" for name in PARTS))
        save(Store(root), step, parts={name: content(step, name) for name in names})
    return root


@pytest.fixture
def store(pristine: Path, tmp_path: Path) -> Store:
    shutil.copytree(pristine, tmp_path / "run" / "checkpoints", symlinks=True)
    return Store(tmp_path / "run" / "checkpoints")


@dataclass(frozen=True)
class Damage:
    """What is done to a part of the newest checkpoint, and the byte range to be named; None if it is not its bytes."""

    do: Callable[[Path, Store], None]
    has_range: bool


def _truncate(path: Path, store: Store) -> None:
    os.truncate(path, SIZE - 1)


def _extend(path: Path, store: Store) -> None:
    with path.open("ab") as end:
        end.write(b"\0")


def _flip(path: Path, store: Store) -> None:
    data = bytearray(path.read_bytes())
    data[PAGE + 17] ^= 0x10
    path.write_bytes(data)


def _flip_the_last_bit(path: Path, store: Store) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 0x01
    path.write_bytes(data)


def _zero_a_page(path: Path, store: Store) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:PAGE] + bytes(PAGE) + data[2 * PAGE :])


def _swap_with_its_twin(path: Path, store: Store) -> None:
    twin = Path(f"{path}.twin")
    mine, other = path.read_bytes(), twin.read_bytes()
    path.write_bytes(other)
    twin.write_bytes(mine)


def _delete(path: Path, store: Store) -> None:
    path.unlink()


def _empty(path: Path, store: Store) -> None:
    path.write_bytes(b"")


def _link(path: Path, store: Store) -> None:
    path.rename(store.root.parent / "moved.bin")
    path.symlink_to(store.root.parent / "moved.bin")


def _directory(path: Path, store: Store) -> None:
    path.unlink()
    path.mkdir()


def _of_another_checkpoint(path: Path, store: Store) -> None:
    other = store.path("checkpoint-2") / path.relative_to(store.path("checkpoint-3"))
    shutil.copy2(other, path)


def _same_size_and_time(path: Path, store: Store) -> None:
    before = path.stat()
    path.write_bytes(bytes(reversed(path.read_bytes())))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)


DAMAGES = [
    pytest.param(Damage(_truncate, False), id="truncated", marks=pytest.mark.promise("M26")),
    pytest.param(Damage(_extend, False), id="extended"),
    pytest.param(Damage(_flip, True), id="one bit flipped"),
    pytest.param(Damage(_flip_the_last_bit, True), id="the last bit flipped"),
    pytest.param(Damage(_zero_a_page, True), id="a page of zeros"),
    pytest.param(Damage(_swap_with_its_twin, True), id="two parts swapped"),
    pytest.param(Damage(_delete, False), id="deleted", marks=pytest.mark.promise("M26", "M21")),
    pytest.param(Damage(_empty, False), id="empty"),
    pytest.param(Damage(_link, False), id="a link"),
    pytest.param(Damage(_directory, False), id="a directory"),
    pytest.param(Damage(_of_another_checkpoint, True), id="another checkpoint's part"),
    pytest.param(Damage(_same_size_and_time, True), id="same size and time"),
]


@pytest.mark.promise("M16", "K4")
@PLACES
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_part_is_found_named_and_survived(store: Store, damage: Damage, part: str) -> None:
    damage.do(store.path("checkpoint-3") / part, store)
    verdict = verify(store, "checkpoint-3", Level.FULL)
    assert verdict.is_damaged
    found = next(finding for finding in verdict.findings if finding.part == part)
    assert (found.start, found.end) == ((0, SIZE) if damage.has_range else (None, None))
    _survived(store)


MANIFESTS: dict[str, Callable[[bytes, bytes], bytes]] = {
    "garbage": lambda mine, other: os.urandom(len(mine)),
    "empty": lambda mine, other: b"",
    "truncated": lambda mine, other: mine[: len(mine) // 2],
    "extended": lambda mine, other: mine + b"\n",
    "not utf-8": lambda mine, other: mine.replace(b"root.bin", b"root\xff\xfebin"),
    "one bit flipped": lambda mine, other: mine.replace(b'"step":3', b'"step":2'),
    "another tool's": lambda mine, other: b'{"files": []}',
}


@pytest.mark.promise("M16", "K4", "M26")
@pytest.mark.parametrize("change", MANIFESTS.values(), ids=MANIFESTS)
def test_a_damaged_manifest_is_found_and_survived(store: Store, change: Callable[[bytes, bytes], bytes]) -> None:
    path = store.path("checkpoint-3") / "manifest.json"
    path.write_bytes(change(path.read_bytes(), b""))
    [found] = verify(store, "checkpoint-3", Level.FULL).findings
    assert found.part == "manifest.json"
    _survived(store)


@pytest.mark.promise("K4")
def test_another_checkpoints_manifest_is_found_by_every_part_it_does_not_fit(store: Store) -> None:
    shutil.copy2(store.path("checkpoint-2") / "manifest.json", store.path("checkpoint-3") / "manifest.json")
    verdict = verify(store, "checkpoint-3", Level.FULL)
    assert {finding.part for finding in verdict.findings} >= set(PARTS)
    _survived(store)


@pytest.mark.promise("M26", "M21")
def test_metadata_without_its_shards_is_not_chosen(store: Store) -> None:
    shutil.rmtree(store.path("checkpoint-3") / "state")
    missing = {finding.part for finding in verify(store, "checkpoint-3", Level.QUICK).findings}
    assert missing == {"state/deep.bin", "state/deep.bin.twin"}
    _survived(store)


def test_a_manifest_of_another_version_is_skipped_and_stays(store: Store) -> None:
    path = store.path("checkpoint-3") / "manifest.json"
    path.write_bytes(path.read_bytes().replace(b"unbroken.checkpoint/2", b"unbroken.checkpoint/7"))
    before = tree(store.root)
    assert not verify(store, "checkpoint-3", Level.FULL).is_sound
    choice = resume_point(store, Level.FULL, job="j9", at_ns=9)
    assert choice.chosen is not None and choice.chosen.name == "checkpoint-2"
    assert tree(store.root) == before


def test_what_only_bytes_can_tell_a_quick_look_does_not_claim_to_have_seen(store: Store) -> None:
    _flip(store.path("checkpoint-3") / "root.bin", store)
    quick = verify(store, "checkpoint-3", Level.QUICK)
    assert quick.is_sound and quick.checked_bytes == 0


def test_the_command_names_part_and_range_and_exits_with_3(store: Store) -> None:
    _flip(store.path("checkpoint-3") / "state/deep.bin", store)
    command = [sys.executable, "-m", "unbroken", "verify", str(store.root.parent), "--full", "--json"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 3 and ended.stderr == ""
    said = json.loads(ended.stdout)
    assert [each["is_sound"] for each in said["checkpoints"]] == [False, True, True]
    [finding] = said["checkpoints"][0]["findings"]
    assert (finding["part"], finding["start"], finding["end"]) == ("state/deep.bin", 0, SIZE)


def _survived(store: Store) -> None:
    """The next older one is chosen; the bad one stands in quarantine with its reason and every byte it had."""
    before = tree(store.path("checkpoint-3"))
    choice = resume_point(store, Level.FULL, job="j9", at_ns=9)
    assert choice.chosen is not None and choice.chosen.name == "checkpoint-2"
    assert [over.moved_to for over in choice.skipped] == ["quarantine/checkpoint-3"]
    assert not store.path("checkpoint-3").exists()
    assert tree(store.path("quarantine/checkpoint-3")) == before
    reason = json.loads(store.path("quarantine/checkpoint-3.reason.json").read_text())
    assert reason["schema"] == "unbroken.quarantine/1" and reason["reasons"]
    again = resume_point(store, Level.FULL, job="j10", at_ns=10)
    assert again.chosen is not None and again.chosen.name == "checkpoint-2" and again.skipped == ()
