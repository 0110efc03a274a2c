"""Bytes that are not those that were written never reach a tensor, and nothing in a checkpoint is ever run."""

import io
import os
import pickle
import zipfile
from pathlib import Path

import pytest
import torch

from tests.unit.state.payloads import JOB, differing, load, poisoned, save
from unbroken import errors
from unbroken.state.payload import read_index
from unbroken.store.commit import Record, begin, commit
from unbroken.store.digest import BLOCK_BYTES
from unbroken.store.directory import Store
from unbroken.store.names import PERIODIC

PART = "state/__0_0.distcp"


def tensors() -> dict[str, torch.Tensor]:
    """Three blocks' worth: the middle tensor crosses the first boundary."""
    return {
        "first": torch.arange(1000.0),
        "middle": torch.arange(5_000_000, dtype=torch.int32),
        "last": torch.arange(5_000_000, dtype=torch.int32),
    }


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> tuple[Store, str]:
    store = Store(tmp_path_factory.mktemp("original"))
    return store, save(store, tensors())


@pytest.fixture
def saved(original: tuple[Store, str], tmp_path: Path) -> tuple[Store, str]:
    """A copy to be damaged; the bytes are shared until they are changed."""
    store, name = original
    for path in store.path(name).rglob("*"):
        target = tmp_path / path.relative_to(store.root)
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.is_file():
            target.write_bytes(path.read_bytes())
    return Store(tmp_path), name


def damage(path: Path, offset: int, new: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(new)


@pytest.mark.parametrize("where", ["first", "middle", "last"])
@pytest.mark.parametrize("kind", ["one flipped bit", "a zeroed page"])
def test_damage_is_named_by_part_and_range_and_reaches_no_tensor(
    saved: tuple[Store, str], where: str, kind: str
) -> None:
    store, name = saved
    index = read_index(store, name, store.read_manifest(name))
    at = index.tensors[where].chunks[0].at + 200
    path = store.path(name) / PART
    before = path.read_bytes()[at : at + 4096]
    damage(path, at, bytes([before[0] ^ 1]) if kind == "one flipped bit" else bytes(4096))
    live = poisoned(tensors())
    with pytest.raises(errors.DamagedCheckpoint) as refused:
        load(store, name, live)
    block = at // BLOCK_BYTES
    low, high = block * BLOCK_BYTES, min((block + 1) * BLOCK_BYTES, path.stat().st_size)
    [finding] = refused.value.findings
    assert finding.startswith(f"{PART}: bytes {low:,} to {high:,} ")
    for key, tensor in live.items():
        written = tensor != poisoned({key: tensor})[key]
        assert torch.equal(tensor[written], tensors()[key][written]), f"{key} holds a number nobody saved"


def test_a_truncated_part_is_damage(saved: tuple[Store, str]) -> None:
    store, name = saved
    path = store.path(name) / PART
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(errors.DamagedCheckpoint) as refused:
        load(store, name, poisoned(tensors()))
    assert refused.value.findings[0].startswith(f"{PART}: bytes 33,554,432 to ")


def test_a_part_that_is_gone_cannot_be_read(saved: tuple[Store, str]) -> None:
    store, name = saved
    (store.path(name) / PART).unlink()
    with pytest.raises(errors.StorageFailed):
        load(store, name, poisoned(tensors()))


@pytest.mark.parametrize("offset", [0, 30, 200])
def test_one_flipped_bit_in_the_index_is_damage(saved: tuple[Store, str], offset: int) -> None:
    store, name = saved
    path = store.path(name) / "state/index.json"
    damage(path, offset, bytes([path.read_bytes()[offset] ^ 1]))
    with pytest.raises(errors.DamagedCheckpoint) as refused:
        load(store, name, poisoned(tensors()))
    assert refused.value.findings[0].startswith("state/index.json: bytes 0 to ")


def test_damage_where_nothing_is_wanted_is_not_met(saved: tuple[Store, str]) -> None:
    store, name = saved
    damage(store.path(name) / PART, store.read_manifest(name).parts[-2].size_bytes - 5000, bytes(3000))
    wanted = {"first": tensors()["first"]}
    live = poisoned(wanted)
    load(store, name, live)
    assert differing(wanted, live) == []


def test_a_checkpoint_without_an_index_is_damage(tmp_path: Path) -> None:
    store = Store(tmp_path)
    draft = begin(store, step=1, job=JOB)
    part = draft.write_part("trainer_state.json", [b"{}"])
    name = commit(draft, plan=[part.name], parts=[part], record=Record(kind=PERIODIC, saved_at_ns=1))
    with pytest.raises(errors.DamagedCheckpoint) as refused:
        load(store, name, {})
    assert refused.value.findings == ("state/index.json: the manifest does not name it",)


class Malice:
    """Unpickled, it leaves a mark."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.mark),)


def forged(blob: bytes, mark: Path) -> bytes:
    """The same file, of the same length, its ``data.pkl`` replaced by code as far as that fits."""
    with zipfile.ZipFile(io.BytesIO(blob)) as archive:
        info = archive.getinfo("archive/data.pkl")
    evil = pickle.dumps(Malice(mark), protocol=2)
    assert len(evil) <= info.file_size
    at = blob.index(b"\x80\x02", info.header_offset)
    return blob[:at] + evil + blob[at + len(evil) :]


def test_code_in_the_metadata_and_in_every_blob_is_never_run(tmp_path: Path) -> None:
    store = Store(tmp_path / "s")
    state = {"a": torch.arange(50.0), "b": torch.arange(60)}
    name = save(store, state)
    mark = tmp_path / "m"
    directory = store.path(name)
    manifest = store.read_manifest(name)
    content = {part.name: (directory / part.name).read_bytes() for part in manifest.parts}
    whole = content[PART]
    cut = whole.index(b"PK\x03\x04", whole.index(b"PK\x05\x06"))
    content[PART] = b"".join(forged(blob, mark) for blob in (whole[:cut], whole[cut:]))
    content["state/.metadata"] = pickle.dumps(Malice(mark))
    # A forger who knows the digests writes a checkpoint that proves itself.
    draft = begin(store, step=2, job=JOB)
    parts = [draft.write_part(part, [data]) for part, data in content.items()]
    evil = commit(draft, plan=list(content), parts=parts, record=Record(kind=PERIODIC, saved_at_ns=2))
    live = poisoned(state)
    load(store, evil, live)
    assert differing(state, live) == []
    assert not mark.exists()
    # The trap is sharp: one who unpickles springs it.
    with (store.path(evil) / "state/.metadata").open("rb") as file:
        pickle.load(file)
    assert mark.exists()
