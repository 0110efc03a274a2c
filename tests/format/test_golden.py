"""A run that an earlier version wrote, kept in git, still opens, and its bytes are still what this version writes."""

import shutil
from pathlib import Path

import pytest

from tests.format.make_golden import GOLDEN, T0, content, make
from tests.unit.store.saving import tree
from unbroken.records.summary import checkpoint_lines, summarize
from unbroken.store.check import Level, verify
from unbroken.store.choose import resume_point
from unbroken.store.directory import Store
from unbroken.store.manifest import Tensor, decode, encode
from unbroken.store.parts import read_part
from unbroken.store.scan import newest_first, scan
from unbroken.store.sweep import pinned_ids

STORE = Store(GOLDEN / "checkpoints")
COMMITTED = [
    "final",
    "checkpoint-50",
    "checkpoint-40",
    "checkpoint-30-shutdown",
    "checkpoint-20.2",
    "checkpoint-20",
    "checkpoint-10",
]


def test_everything_in_it_is_still_recognised() -> None:
    found = scan(STORE)
    assert newest_first(STORE, found.committed) == COMMITTED
    assert found.quarantined == ("checkpoint-70",)
    assert found.abandoned == ("abandoned/checkpoint-50", "abandoned/checkpoint-60")
    assert (found.torn, found.leftover, found.foreign, found.latest) == ((), (), (), "final")
    assert pinned_ids(STORE) == {STORE.read_manifest("checkpoint-20").id}


@pytest.mark.parametrize("name", [*COMMITTED, "abandoned/checkpoint-50", "abandoned/checkpoint-60"])
def test_every_checkpoint_still_proves_sound_to_the_last_byte(name: str) -> None:
    verdict = verify(STORE, name, Level.FULL)
    assert verdict.findings == () and verdict.foreign == ()


@pytest.mark.parametrize("path", sorted(GOLDEN.rglob("manifest.json")), ids=lambda path: path.parent.name)
def test_every_manifest_is_encoded_again_to_the_same_bytes(path: Path) -> None:
    assert encode(decode(path.read_bytes(), path)) == path.read_bytes()


def test_the_fields_of_a_manifest_are_still_read() -> None:
    found = STORE.read_manifest("checkpoint-10")
    assert (found.step, found.kind, found.saved_at_ns, found.block_bytes) == (10, "periodic", T0 + 10, 1024)
    assert {part.name: len(part.digest.blocks) for part in found.parts} == {
        "empty": 1,
        "state/.metadata": 1,
        "state/__0_0.distcp": 3,
        "state/__1_0.distcp": 2,
    }
    assert found.tensors["embed.weight"] == Tensor("bfloat16", (4, 8), "0f" * 16)
    assert repr(sorted(found.metrics.items())) == "[('accuracy', 0.125), ('best', -inf), ('loss', 2.5), ('worst', nan)]"
    assert found.facts["note"] == "Zürich ✓"


def test_the_bytes_of_a_part_are_still_read() -> None:
    manifest = STORE.read_manifest("checkpoint-10")
    part = next(part for part in manifest.parts if part.name == "state/__0_0.distcp")
    found = b"".join(bytes(block) for block in read_part(STORE.files, STORE.path("checkpoint-10"), manifest, part))
    assert found == content(10, "state/__0_0.distcp", 2051)


def test_a_sealed_folder_still_tells_its_tool_and_its_tensors() -> None:
    found = STORE.read_manifest("checkpoint-40")
    assert (found.kind, found.origin, found.step) == ("sealed", "transformers", 40)
    assert {name: (tensor.dtype, tensor.shape) for name, tensor in found.tensors.items()} == {"w": ("F32", (2,))}


def test_a_job_that_starts_in_it_resumes_from_the_newest(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN, tmp_path / "run", symlinks=True)
    choice = resume_point(Store(tmp_path / "run" / "checkpoints"), Level.FULL, job="j2", at_ns=1)
    assert choice.chosen is not None and choice.chosen.name == "final" and choice.passed_over == ()


def test_status_and_list_still_read_it() -> None:
    assert summarize(STORE, now_s=0.0).newest_usable_name == "final"
    states = [line.state for line in checkpoint_lines(STORE)]
    assert states == ["committed"] * 7 + ["quarantined"] + ["abandoned"] * 2


def test_this_version_writes_it_byte_for_byte(tmp_path: Path) -> None:
    make(tmp_path / "run")
    assert tree(tmp_path / "run") == tree(GOLDEN)
