import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.unit.state.tiny import job, quietly
from unbroken.state import rng
from unbroken.state.flatten import flatten, unflatten
from unbroken.state.rng import capture_rng, restore_rng
from unbroken.store.fields import Malformed


def draws() -> tuple[object, ...]:
    return (
        [random.random(), random.gauss(0, 1), random.getrandbits(100)],
        np.random.standard_normal(3).tolist(),
        np.random.randint(0, 1000, 5).tolist(),
        torch.rand(3).tolist(),
        torch.randn(20).tolist(),
        torch.randperm(9).tolist(),
    )


@pytest.mark.parametrize("drawn_before", [0, 1, 2])
def test_after_a_restore_the_same_draws_come_as_without_it(drawn_before: int) -> None:
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    for _ in range(drawn_before):
        draws()
    np.random.standard_normal()  # leaves half of a pair behind, which belongs to the state too
    random.gauss(0, 1)
    parts = flatten("rng", capture_rng(), allow_pickle=False)
    structure = json.loads(json.dumps(parts.structure))
    tensors = {name: tensor.clone() for name, tensor in parts.tensors.items()}
    expected = draws()
    draws()
    restore_rng(unflatten(structure, tensors, item="rng", allow_pickle=False))
    assert draws() == expected
    assert draws() != expected


def test_capturing_draws_nothing_and_what_is_captured_does_not_move_on() -> None:
    torch.manual_seed(5)
    state = capture_rng()
    first = draws()
    restore_rng(state)
    capture_rng()
    assert draws() == first
    restore_rng(state)
    assert draws() == first


@pytest.mark.parametrize("is_readable", [True, False])
@pytest.mark.parametrize("drawn_before", [0, 1, 700])
def test_a_glance_expands_to_what_a_capture_finds(
    drawn_before: int, is_readable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_readable:
        monkeypatch.setattr(rng, "_is_twister_readable", lambda: False)
    random.seed(5)
    for _ in range(drawn_before):
        random.gauss(0.0, 1.0)
    glance, captured = rng.glance_at_rng(), capture_rng()
    random.random()
    torch.rand(3)
    found = rng.RngGlance(*glance).state()
    assert found["python"] == captured["python"]
    assert torch.equal(found["torch"], captured["torch"])  # type: ignore[arg-type]


def test_a_glance_shows_that_numpy_drew() -> None:
    before = rng.glance_at_numpy(np)
    assert rng.glance_at_numpy(np) == before
    np.random.random()
    assert rng.glance_at_numpy(np) != before


def test_glances_follow_every_draw_seed_and_whole_round_of_python_and_numpy() -> None:
    random.seed(5)
    np.random.seed(5)
    seen = set()
    # A twister makes new words after 624: after so many draws its position is the same again.
    for draws in (0, 1, 623, 624, 624 * 3):
        random.getrandbits(32 * draws) if draws else random.seed(6)
        np.random.bytes(4 * draws) if draws else np.random.seed(6)
        glance = rng.RngGlance(*rng.glance_at_rng())
        assert glance.state()["python"] == random.getstate()
        seen.add(glance.numpy)
    assert len(seen) == 5


@pytest.mark.parametrize(
    "broken",
    [
        {"python": (3, (1, 2), None)},
        {"torch": torch.zeros(3, dtype=torch.uint8)},
        {"torch": "text"},
        {"numpy": {"bit_generator": "PCG64"}},
        {"cuda": [torch.zeros(16, dtype=torch.uint8)] * 99},
        {"cuda": None},
        {"stranger": 1},
    ],
    ids=lambda broken: next(iter(broken)),
)
def test_a_state_that_does_not_fit_changes_no_generator(broken: dict[str, object]) -> None:
    before = capture_rng()
    other = {**before, **broken}
    if "python" not in broken:
        other["python"] = random.Random(8).getstate()  # set first, so it must be set back
    with pytest.raises(Malformed):
        restore_rng(other)
    expected = draws()
    restore_rng(before)
    assert draws() == expected


def test_something_else_than_a_state_is_malformed() -> None:
    with pytest.raises(Malformed):
        restore_rng(None)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_draws_after_a_restore_are_the_same() -> None:
    torch.manual_seed(3)
    torch.rand(5, device="cuda")
    state = capture_rng([torch.cuda.current_device()])
    first = torch.randn(10, device="cuda")
    restore_rng(state)
    assert torch.equal(torch.randn(10, device="cuda"), first)
    with pytest.raises(Malformed, match="1 CUDA devices were saved; 0 are here"):
        restore_rng(state, [])


class Drawing:
    """An object that draws from the global generators whenever it is asked for its state."""

    def state_dict(self) -> dict[str, float]:
        return {"drawn": float(torch.rand(())) + random.random()}

    def load_state_dict(self, state: dict[str, float]) -> None:
        pass


def test_an_object_that_draws_in_state_dict_shifts_no_draw_of_a_resume(tmp_path: Path) -> None:
    def draws(directory: Path, *targets: int) -> list[float]:
        found: list[float] = []
        for target in targets:
            random.seed(3)
            torch.manual_seed(3)
            settings = quietly(save_steps=1)
            job(directory, target, settings, lambda run, step: found.append(float(torch.rand(()))), odd=Drawing())
        return found

    assert draws(tmp_path / "two", 3, 5) == draws(tmp_path / "one", 5)
