"""Makes the golden directory: a run as this version of the format leaves it, kept in git.

    python -m tests.format.make_golden        writes tests/format/golden; only for a new format, beside the old ones

What is here must still open with every later version. Everything is fixed: clock, job, bytes.
"""

import json
import shutil
from pathlib import Path

from unbroken.files import LOCAL
from unbroken.store.choose import quarantine
from unbroken.store.commit import Record, begin, commit, point_latest
from unbroken.store.digest import digest_of
from unbroken.store.directory import Store
from unbroken.store.manifest import Manifest, Part, Tensor, encode
from unbroken.store.names import FINAL, PERIODIC, SHUTDOWN
from unbroken.store.rewind import rewind
from unbroken.store.scan import newest_first, scan
from unbroken.store.seal import seal
from unbroken.store.sweep import pin

GOLDEN = Path(__file__).parent / "golden" / "format-2"
OLD = Path(__file__).parent / "golden" / "format-1"
JOB = "j0001_golden"
T0 = 1_700_000_000_000_000_000
BLOCK = 1024


def content(step: int, part: str, size: int) -> bytes:
    """Bytes that no compression and no coincidence makes equal to another part's."""
    word = f"{part} of step {step}; ".encode()
    return (word * (size // len(word) + 1))[:size]


def many_blocks(store: Store, step: int) -> None:
    """A checkpoint whose parts have 1, 2 and 3 blocks and none, by a block size that keeps them small."""
    sizes = {"state/.metadata": 300, "state/__0_0.distcp": 2 * BLOCK + 3, "state/__1_0.distcp": 2 * BLOCK, "empty": 0}
    directory = store.path(f"checkpoint-{step}")
    parts = []
    for name, size in sizes.items():
        data = content(step, name, size)
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(data)
        parts.append(Part(name, digest_of([data], BLOCK)))
    manifest = Manifest(
        id=f"{JOB}-{step}-{T0 + step:x}",
        step=step,
        kind=PERIODIC,
        saved_at_ns=T0 + step,
        job=JOB,
        origin="unbroken",
        parts=tuple(parts),
        tensors={"embed.weight": Tensor("bfloat16", (4, 8), "0f" * 16), "head.bias": Tensor("float32", (), "f0" * 16)},
        metrics={"loss": 2.5, "accuracy": 0.125, "worst": float("nan"), "best": float("-inf")},
        fingerprint="xxh3-128:" + "ab" * 16,
        metadata={"world_size": 2, "versions": {"torch": "2.13.0"}, "note": "Zürich ✓"},
        block_bytes=BLOCK,
    )
    (directory / "manifest.json").write_bytes(encode(manifest))


def save(store: Store, step: int, *, at: int, kind: str = PERIODIC) -> str:
    """An ordinary checkpoint of two small parts."""
    draft = begin(store, step=step, job=JOB)
    sizes = {"trainer_state.json": 40, "state/__0_0.distcp": 100}
    parts = [draft.write_part(name, [content(step, name, size + at)]) for name, size in sizes.items()]
    record = Record(kind=kind, saved_at_ns=T0 + at, metrics={"loss": 1.0 / at})
    return commit(draft, plan=list(sizes), parts=parts, record=record)


def sealed_folder(store: Store) -> None:
    """A folder with the file names that the Hugging Face Trainer uses."""
    folder = store.path("checkpoint-40")
    folder.mkdir()
    header = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(range(8)))
    (folder / "optimizer.pt").write_bytes(content(40, "optimizer", 64))
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 40, "epoch": 0.5}))
    seal(store, "checkpoint-40", at_ns=T0 + 40)


def make(root: Path) -> None:
    """Write the whole run."""
    store = Store(root / "checkpoints")
    store.root.mkdir(parents=True)
    many_blocks(store, 10)
    save(store, 20, at=20)
    save(store, 20, at=21)
    save(store, 30, at=30, kind=SHUTDOWN)
    sealed_folder(store)
    for step in (50, 60):
        save(store, step, at=step)
    rewind(store, newest_first(store, scan(store).committed), target="checkpoint-40", job=JOB, at_ns=T0 + 61)
    save(store, 50, at=62)
    save(store, 70, at=70)
    (store.path("checkpoint-70") / "trainer_state.json").write_bytes(b"")
    quarantine(store, "checkpoint-70", ("trainer_state.json: has 0 bytes, not 110",), job=JOB, at_ns=T0 + 71)
    last = save(store, 80, at=80, kind=FINAL)
    pin(store, "checkpoint-20", reason="for the paper", job=JOB, at_ns=T0 + 81)
    point_latest(store, last, job=JOB)


def main() -> None:
    """Make the golden directory anew."""
    if GOLDEN.exists():
        shutil.rmtree(GOLDEN)
    make(GOLDEN)
    LOCAL.sync_directory(GOLDEN)


if __name__ == "__main__":
    main()
