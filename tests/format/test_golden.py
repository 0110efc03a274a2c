"""Stores that this and an earlier version wrote, kept in git, still open; today's bytes are still what is written."""

import shutil
from pathlib import Path

import pytest

from tests.format.make_golden import GOLDEN, OLD, T0, content, make
from tests.unit.store.saving import tree
from unbroken.records.summary import checkpoint_lines, summarize
from unbroken.store.check import Level, verify
from unbroken.store.choose import resume_point
from unbroken.store.directory import Store
from unbroken.store.manifest import Tensor, decode, encode
from unbroken.store.parts import read_part
from unbroken.store.scan import newest_first, scan
from unbroken.store.sweep import pinned_ids

STORES = [Store(GOLDEN / "checkpoints"), Store(OLD / "checkpoints")]
both = pytest.mark.parametrize("store", STORES, ids=lambda store: store.root.parent.name)
COMMITTED = [
    "final",
    "checkpoint-50",
    "checkpoint-40",
    "checkpoint-30-shutdown",
    "checkpoint-20.2",
    "checkpoint-20",
    "checkpoint-10",
]


@both
def test_everything_in_it_is_still_recognised(store: Store) -> None:
    found = scan(store)
    assert newest_first(store, found.committed) == COMMITTED
    assert found.quarantined == ("checkpoint-70",)
    assert found.abandoned == ("abandoned/checkpoint-50", "abandoned/checkpoint-60")
    assert (found.torn, found.leftover, found.foreign, found.latest) == ((), (), (), "final")
    assert pinned_ids(store) == {store.read_manifest("checkpoint-20").id}


@both
@pytest.mark.parametrize("name", [*COMMITTED, "abandoned/checkpoint-50", "abandoned/checkpoint-60"])
def test_every_checkpoint_still_proves_sound_to_the_last_byte(store: Store, name: str) -> None:
    verdict = verify(store, name, Level.FULL)
    assert verdict.findings == () and verdict.foreign == ()


@pytest.mark.parametrize("path", sorted(GOLDEN.rglob("manifest.json")), ids=lambda path: path.parent.name)
def test_every_manifest_is_encoded_again_to_the_same_bytes(path: Path) -> None:
    assert encode(decode(path.read_bytes(), path)) == path.read_bytes()


@pytest.mark.parametrize("path", sorted(OLD.rglob("manifest.json")), ids=lambda path: path.parent.name)
def test_a_manifest_of_the_first_format_says_what_today_s_says(path: Path) -> None:
    today = GOLDEN / path.relative_to(OLD)
    assert b"checkpoint/1" in path.read_bytes() and b"checkpoint/2" in today.read_bytes()
    assert repr(decode(path.read_bytes(), path)) == repr(decode(today.read_bytes(), today))


@both
def test_the_fields_of_a_manifest_are_still_read(store: Store) -> None:
    found = store.read_manifest("checkpoint-10")
    assert (found.step, found.kind, found.saved_at_ns, found.block_bytes) == (10, "periodic", T0 + 10, 1024)
    assert {part.name: len(part.digest.blocks) for part in found.parts} == {
        "empty": 1,
        "state/.metadata": 1,
        "state/__0_0.distcp": 3,
        "state/__1_0.distcp": 2,
    }
    assert found.tensors["embed.weight"] == Tensor("bfloat16", (4, 8), "0f" * 16)
    assert repr(sorted(found.metrics.items())) == "[('accuracy', 0.125), ('best', -inf), ('loss', 2.5), ('worst', nan)]"
    assert found.metadata["note"] == "Zürich ✓"


@both
def test_the_bytes_of_a_part_are_still_read(store: Store) -> None:
    manifest = store.read_manifest("checkpoint-10")
    part = next(part for part in manifest.parts if part.name == "state/__0_0.distcp")
    found = b"".join(bytes(block) for block in read_part(store.files, store.path("checkpoint-10"), manifest, part))
    assert found == content(10, "state/__0_0.distcp", 2051)


@both
def test_a_sealed_folder_still_shows_its_tool_and_its_tensors(store: Store) -> None:
    found = store.read_manifest("checkpoint-40")
    assert (found.kind, found.origin, found.step) == ("sealed", "transformers", 40)
    assert {name: (tensor.dtype, tensor.shape) for name, tensor in found.tensors.items()} == {"w": ("F32", (2,))}


@both
def test_a_job_that_starts_in_it_resumes_from_the_newest(store: Store, tmp_path: Path) -> None:
    shutil.copytree(store.root.parent, tmp_path / "run", symlinks=True)
    choice = resume_point(Store(tmp_path / "run" / "checkpoints"), Level.FULL, job="j2", at_ns=1)
    assert choice.chosen is not None and choice.chosen.name == "final" and choice.skipped == ()


@both
def test_status_and_list_still_read_it(store: Store) -> None:
    assert summarize(store, now_s=0.0).newest_usable_name == "final"
    states = [line.state for line in checkpoint_lines(store)]
    assert states == ["committed"] * 7 + ["quarantined"] + ["abandoned"] * 2


def test_this_version_writes_it_byte_for_byte(tmp_path: Path) -> None:
    make(tmp_path / "run")
    assert tree(tmp_path / "run") == tree(GOLDEN)
