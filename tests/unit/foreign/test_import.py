"""``unbroken import``: a new run that continues, or one error and nothing written."""

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import unbroken
from tests.unit.foreign.test_read import dcp_folder, per_rank, trained
from tests.unit.state.tiny import adam, bits, job, learn, model, quietly, tiny
from unbroken.cli.main import main
from unbroken.errors import NotExact, StateDiffers

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def call(*arguments: object) -> tuple[int, dict[str, Any]]:
    """The exit code and the document of an import."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        code = main(["import", "--json", *map(str, arguments)])
    return code, json.loads(printed.getvalue())


def moments(optimizer: torch.optim.Optimizer) -> list[dict[str, torch.Tensor]]:
    return [dict(optimizer.state[p]) for group in optimizer.param_groups for p in group["params"]]


def same(one: list[dict[str, torch.Tensor]], other: list[dict[str, torch.Tensor]]) -> bool:
    pairs = zip(one, other, strict=True)
    return all(a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a) for a, b in pairs)


@pytest.mark.promise("M1", "M5")
@pytest.mark.parametrize("kind", ["model", "dcp"])
def test_both_layouts_continue_in_a_run_with_the_same_bits(tmp_path: Path, kind: str) -> None:
    """The imported run, and the original objects trained on: the same weights and moments after two more steps."""
    objects = trained()
    per_rank(tmp_path, objects, ranks=1, step=4)
    dcp_folder(tmp_path / "dcp_000004", objects)
    code, document = call(tmp_path, tmp_path / "run", "--require-kind", kind, "--item", "model", "--item", "optimizer")
    assert code == 0 and document["kind"] == kind and document["step"] == 4
    resumed = tiny(9)
    with pytest.raises(NotExact) as refused:
        job(tmp_path / "run", 6, **resumed)
    assert [name for name, _ in refused.value.differences] == ["rng_state"]
    torch.manual_seed(3)
    run = job(tmp_path / "run", 6, quietly(accept=("rng_state",)), **resumed)
    assert run.step == 6
    torch.manual_seed(3)
    for _ in range(2):
        learn(objects)
    assert bits(resumed["model"]) == bits(objects["model"])
    assert same(moments(resumed["optimizer"]), moments(objects["optimizer"]))


def test_items_are_loaded_by_name_without_a_run(tmp_path: Path) -> None:
    objects = trained()
    per_rank(tmp_path, objects)
    assert call(tmp_path / "model_000100.pt", tmp_path / "run")[0] == 0
    module = model(5)
    optimizer = adam(module)
    found = unbroken.load(tmp_path / "run", model=module, optimizer=optimizer)
    assert (found.step, found.counters, found.notes) == (100, {"val_loss": 2.5}, ())
    assert found.items == ("model", "optimizer", "scheduler")
    assert bits(module) == bits(objects["model"])
    assert same(moments(optimizer), moments(objects["optimizer"]))


@pytest.mark.promise("M26")
def test_a_numbered_optimizer_fits_the_live_one_or_is_an_error(tmp_path: Path) -> None:
    per_rank(tmp_path, trained())
    assert call(tmp_path / "model_000100.pt", tmp_path / "run")[0] == 0
    module = model(5)
    first, second = list(module[0].parameters()), list(module[2].parameters())
    two_groups = torch.optim.AdamW([{"params": first}, {"params": second}])
    with pytest.raises(StateDiffers) as refused:
        unbroken.load(tmp_path / "run", model=module, optimizer=two_groups)
    assert refused.value.changed == ("optimizer: groups of 4 parameters in the checkpoint, 2 and 2 here",)
    turned = torch.optim.AdamW([*second, *first])
    with pytest.raises(StateDiffers) as refused:
        unbroken.load(tmp_path / "run", model=module, optimizer=turned)
    assert len(refused.value.changed) == 8 and not turned.state
    wide = model(5, width=7)
    with pytest.raises(StateDiffers):
        unbroken.load(tmp_path / "run", model=wide)


def test_an_optimizer_that_knows_its_names_needs_no_order(tmp_path: Path) -> None:
    module = model()
    optimizer = torch.optim.AdamW(list(module.named_parameters()))
    learn({"optimizer": optimizer})
    saved = {"model": module.state_dict(), "optimizer": optimizer.state_dict(), "step": 3}
    torch.save(saved, tmp_path / "a.pt")
    assert call(tmp_path / "a.pt", tmp_path / "run")[1]["items"]["optimizer"]["kind"] == "optimizer"
    other = model(5)
    again = adam(other)
    unbroken.load(tmp_path / "run", model=other, optimizer=again)
    assert same(moments(again), moments(optimizer))


def test_tied_weights_stay_one_tensor(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self, seed: int) -> None:
            super().__init__()
            torch.manual_seed(seed)
            self.embedding = nn.Embedding(5, 3)
            self.head = nn.Linear(3, 5, bias=False)
            self.head.weight = self.embedding.weight

    module = Tied(1)
    torch.save({"model": {"embedding.weight": module.embedding.weight}, "step": 1}, tmp_path / "a.pt")
    code, _ = call(tmp_path / "a.pt", tmp_path / "run", "--tie", "head.weight=embedding.weight")
    other = Tied(2)
    unbroken.load(tmp_path / "run", model=other)
    assert code == 0 and bits(other) == bits(module) and other.head.weight is other.embedding.weight


@pytest.mark.parametrize(
    ("arguments", "kind", "said"),
    [
        (("plain.pt",), "cannot-import", "state the step"),
        (("model_000100.pt", "--step", "7"), "cannot-import", "--step 7: the checkpoint is of step 100"),
        (("model_000100.pt", "--item", "ema", "--prefix", "net."), "cannot-import", "ema: not in the checkpoint"),
        (("model_000100.pt", "--require-kind", "dcp"), "foreign-kind", ""),
        (("model_000100.pt", "--config", "run.yaml", "--keep-names"), "bad-usage", ""),
        (("model_000100.pt", "--tie", "a"), "bad-usage", ""),
        (("two.pt",), "cannot-import", "its files state different steps: 7, 9"),
        (("two.pt", "--step", "8"), "cannot-import", "its files state different steps: 7, 9"),
        (("cut.pt",), "foreign-damaged", "cut.pt: "),
        (("nothing",), "path-missing", ""),
    ],
)
def test_bad_input_is_one_error_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], kind: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    objects = trained()
    per_rank(tmp_path, objects)
    torch.save(objects["model"].state_dict(), "plain.pt")
    torch.save({"model": objects["model"].state_dict(), "global_step": 7, "step": 9}, "two.pt")
    Path("cut.pt").write_bytes(Path("plain.pt").read_bytes()[:300])
    before = sorted(tmp_path.rglob("*"))
    source, *options = arguments
    code, document = call(source, "runs/a b", *options)
    assert (code, document["kind"]) == (3 if kind == "foreign-damaged" else 2, kind)
    assert said in " ".join(document["details"])
    assert sorted(tmp_path.rglob("*")) == before


def test_a_run_that_exists_is_left_alone(tmp_path: Path) -> None:
    source = per_rank(tmp_path, trained())
    (tmp_path / "file").write_text("mine")
    assert call(source, tmp_path / "run")[0] == 0
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("mine")
    for run in ("run", "file", "notes", "."):
        code, document = call(source, tmp_path / run)
        assert (code, document["kind"]) == (2, "cannot-import")
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("stated", "step"),
    [
        ({"step": torch.tensor(7), "best_val_loss": torch.tensor(0.5)}, None),
        ({"iter_num": 7.0, "best_val_loss": np.float64(0.5)}, None),
        ({"global_step": 9, "step": 7, "best_val_loss": 0.5}, 7),
    ],
)
def test_numbers_are_found_in_tensors_and_arrays_and_the_user_chooses_between_steps(
    tmp_path: Path, stated: dict[str, object], step: int | None
) -> None:
    torch.save({"model": trained()["model"].state_dict(), **stated}, tmp_path / "ckpt.pt")
    code, document = call(tmp_path / "ckpt.pt", tmp_path / "run", *(("--step", step) if step else ()))
    assert (code, document.get("step")) == (0, 7), document
    assert "best_val_loss" not in document["left_out"]


def test_a_dry_run_reads_everything_and_writes_nothing(tmp_path: Path) -> None:
    source = per_rank(tmp_path, trained())
    code, document = call(source, tmp_path / "run", "--dry-run")
    assert code == 0 and document["is_dry_run"] and document["checkpoint"] is None
    assert document["items"]["model"] == {"kind": "module", "tensors": 4}
    assert not (tmp_path / "run").exists()
