"""``unbroken.load`` and ``unbroken.checkpoints``: reading a run from Python, without being one of its jobs."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import unbroken
from tests.unit.state.tiny import adam, bits, job, model, tiny
from unbroken import Run
from unbroken.errors import CheckpointUnknown, DamagedCheckpoint, NotAnItem, NotAStore, StateDiffers


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with checkpoints of steps 2 and 4, and a rate of its own as an item."""

    def count(run: Run, step: int) -> None:
        run.counters["seen"] = step + 1

    torch.manual_seed(7)
    job(tmp_path / "run", 4, body=count, rng=torch.Generator().manual_seed(3), **tiny())
    return tmp_path / "run"


def test_weights_are_read_from_a_run_a_step_or_a_path(run: Path) -> None:
    newest, second, plain = model(5), model(6), model(8)
    compiled = torch.compile(plain, backend="eager")
    torch.manual_seed(11)
    before = torch.get_rng_state()
    found = unbroken.load(run, model=newest)
    assert torch.equal(torch.get_rng_state(), before)
    assert (found.step, found.counters, found.notes) == (4, {"seen": 4}, ())
    assert found.items == ("model", "optimizer", "rng")
    assert found.metrics["loss"] == 0.25
    assert unbroken.load(f"{run}@2", model=second).step == 2
    assert unbroken.load(found.path, model=compiled).path == found.path
    assert bits(newest) != bits(second)
    assert bits(plain) == bits(newest)
    # Nothing was written and nobody holds the run: the next job resumes from it.
    resumed = {**tiny(9), "rng": torch.Generator()}
    job(run, 4, **resumed)
    assert bits(resumed["model"]) == bits(newest)


def test_an_optimizer_and_a_generator_are_read_too(run: Path) -> None:
    module, rng = model(5), torch.Generator()
    optimizer = adam(module)
    unbroken.load(run, model=module, optimizer=optimizer, rng=rng)
    assert torch.equal(rng.get_state(), torch.Generator().manual_seed(3).get_state())
    assert {int(state["step"]) for state in optimizer.state.values()} == {4}
    with pytest.raises(NotAnItem, match="a model, passed to the run"):
        unbroken.load(run, optimizer=optimizer)


def test_what_does_not_fit_is_one_error_and_touches_nothing(run: Path, tmp_path: Path) -> None:
    module = model(5)
    before = bits(module)
    with pytest.raises(StateDiffers) as other:
        unbroken.load(run, net=module)
    assert other.value.changed == ("net: not in the checkpoint, which has model, optimizer, rng",)
    with pytest.raises(StateDiffers):
        unbroken.load(run, model=model(5, width=6))
    with pytest.raises(CheckpointUnknown):
        unbroken.load(f"{run}@3", model=module)
    with pytest.raises(NotAStore):
        unbroken.load(tmp_path, model=module)
    assert bits(module) == before


def test_bytes_that_are_used_are_verified_and_nothing_is_moved(run: Path) -> None:
    part = run / "checkpoints" / "final" / "state" / "__0_0.distcp"
    data = bytearray(part.read_bytes())
    data[len(data) // 2] ^= 1
    part.write_bytes(data)
    with pytest.raises(DamagedCheckpoint):
        unbroken.load(run, model=(module := model()), optimizer=adam(module), rng=torch.Generator())
    assert part.exists()


def test_checkpoints_are_listed_without_torch(run: Path) -> None:
    newest, second = unbroken.checkpoints(run)
    assert (newest.step, newest.name, newest.kind, newest.is_usable, newest.why_not) == (
        4,
        "final",
        "final",
        True,
        None,
    )
    assert newest.metrics["loss"] == 0.25
    assert newest.saved_at is not None
    assert second.saved_at is not None
    assert second.saved_at < newest.saved_at
    assert second.path == run / "checkpoints" / "checkpoint-2"
    assert second.size_bytes == sum(part.stat().st_size for part in second.path.rglob("*") if part.is_file()) - (
        (second.path / "manifest.json").stat().st_size
    )
    (second.path / "state" / "__0_0.distcp").write_bytes(b"short")
    script = (
        f"import sys, unbroken; print(unbroken.checkpoints({str(run)!r})[1].why_not); assert 'torch' not in sys.modules"
    )
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert said.startswith("state/__0_0.distcp: ")
