"""Sealing folders as other tools write them, and loading them afterwards as if nothing had happened.

The ``.pt`` file, the DCP folder and the safetensors folder are written by torch and safetensors themselves. The folders
of Transformers, Accelerate, Lightning and DeepSpeed are their file layout, filled by ``torch.save``.
"""

import json
import shutil
import subprocess
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from tests.conftest import Tool
from unbroken.store.directory import Store
from unbroken.store.seal import seal

# Said for every save and load in one process, which is what is meant here.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
STEP = 500


def weights(seed: int = 0) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {
        "embed.weight": torch.randn(16, 8, generator=draw),
        "head.bias": torch.randn(8, generator=draw, dtype=torch.float64),
        "count": torch.tensor(STEP),
    }


def optimizer() -> dict[str, Any]:
    return {"state": {0: {"exp_avg": torch.ones(4), "step": torch.tensor(3.0)}}, "param_groups": [{"lr": 1e-3}]}


def same(found: dict[str, Any]) -> bool:
    expected = weights()
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def _plain(folder: Path) -> None:
    torch.save(weights(), folder / "model.pt")
    torch.save(optimizer(), folder / "optim.pt")


def _dcp(folder: Path) -> None:
    with warnings.catch_warnings():
        # A fixture of the whole module is made outside of any test's filter.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp_save({"model": weights()}, checkpoint_id=folder, no_dist=True)


def _safetensors(folder: Path) -> None:
    save_file(weights(), folder / "model.safetensors")


def _transformers(folder: Path) -> None:
    save_file(weights(), folder / "model.safetensors", metadata={"format": "pt"})
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin", "scaler.pt"):
        torch.save(optimizer(), folder / name)
    for name in ("config.json", "generation_config.json", "tokenizer.json", "special_tokens_map.json"):
        (folder / name).write_text("{}")
    state = {"global_step": STEP, "epoch": 0.5, "log_history": [{"loss": 1.0, "step": STEP}], "max_steps": 1000}
    (folder / "trainer_state.json").write_text(json.dumps(state, indent=2))


def _accelerate(folder: Path) -> None:
    save_file(weights(), folder / "model.safetensors")
    for name in ("optimizer.bin", "scheduler.bin", "sampler.bin", "scaler.pt", "custom_checkpoint_0.pkl"):
        torch.save(optimizer(), folder / name)
    torch.save({"step": STEP}, folder / "random_states_0.pkl")


def _lightning(folder: Path) -> None:
    state = {"epoch": 1, "global_step": STEP, "state_dict": weights(), "optimizer_states": [optimizer()]}
    for name in (f"epoch=1-step={STEP}.ckpt", "last.ckpt"):
        torch.save(state, folder / name)


def _deepspeed(folder: Path) -> None:
    torch.save({"module": weights(), "global_steps": STEP}, folder / "mp_rank_00_model_states.pt")
    for rank in range(2):
        torch.save(optimizer(), folder / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")


def _load_dcp(folder: Path) -> dict[str, Any]:
    into = {"model": {name: torch.zeros_like(value) for name, value in weights().items()}}
    dcp_load(into, checkpoint_id=folder, no_dist=True)
    return into["model"]


def _load(name: str, key: str | None = None) -> Callable[[Path], dict[str, Any]]:
    def load(folder: Path) -> dict[str, Any]:
        found: dict[str, Any] = torch.load(folder / name, weights_only=True)
        return found[key] if key else found

    return load


Write = Callable[[Path], None]
Read = Callable[[Path], dict[str, Any]]


def _load_safetensors(folder: Path) -> dict[str, Any]:
    return dict(load_file(folder / "model.safetensors"))


FOLDERS: dict[str, tuple[str, Write, Read, str]] = {
    "plain torch.save": (f"step_{STEP}", _plain, _load("model.pt"), "torch"),
    "torch DCP": (f"dcp_step_{STEP:06}", _dcp, _load_dcp, "torch-dcp"),
    "safetensors": (f"step-{STEP}", _safetensors, _load_safetensors, "safetensors"),
    "layout of Transformers": (f"checkpoint-{STEP}", _transformers, _load_safetensors, "transformers"),
    "layout of Accelerate": (f"step_{STEP}", _accelerate, _load_safetensors, "accelerate"),
    "layout of Lightning": ("checkpoints_version_0", _lightning, _load("last.ckpt", "state_dict"), "lightning"),
    "layout of DeepSpeed": (
        f"global_step{STEP}",
        _deepspeed,
        _load("mp_rank_00_model_states.pt", "module"),
        "deepspeed",
    ),
}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every folder, written once."""
    root = tmp_path_factory.mktemp("written")
    for title, (name, write, _, _) in FOLDERS.items():
        (root / title / name).mkdir(parents=True)
        write(root / title / name)
    return root


def inside(folder: Path) -> dict[str, tuple[bytes, int]]:
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != "manifest.json")
    return {str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


@pytest.mark.promise("X6")
@pytest.mark.parametrize("title", FOLDERS)
def test_a_folder_is_sealed_verified_and_still_loads(unbroken: Tool, written: Path, tmp_path: Path, title: str) -> None:
    name, _, read, origin = FOLDERS[title]
    folder = tmp_path / "outputs" / name
    shutil.copytree(written / title / name, folder)
    before = inside(folder)
    ended = unbroken("seal", "outputs", "--all", "--json")
    assert ended.returncode == 0, ended
    [sealed] = json.loads(ended.stdout)["sealed"]
    assert (sealed["name"], sealed["step"], sealed["origin"], sealed["is_new"]) == (name, STEP, origin, True)
    assert inside(folder) == before
    assert same(read(folder))
    assert unbroken("verify", "outputs", "--full").returncode == 0
    again = unbroken("seal", folder, "--json")
    assert again.returncode == 0 and [each["is_new"] for each in json.loads(again.stdout)["sealed"]] == [False]


@pytest.mark.promise("X6", "M16")
@pytest.mark.parametrize("title", FOLDERS)
def test_one_flipped_bit_in_any_file_of_a_sealed_folder_is_found(
    unbroken: Tool, written: Path, tmp_path: Path, title: str
) -> None:
    name = FOLDERS[title][0]
    folder = tmp_path / "outputs" / name
    shutil.copytree(written / title / name, folder)
    assert unbroken("seal", folder, "--step", str(STEP)).returncode == 0
    files = sorted(inside(folder))
    for file in files:
        data = bytearray((folder / file).read_bytes())
        data[len(data) // 2] ^= 1
        (folder / file).write_bytes(data)
    ended = unbroken("verify", folder, "--full", "--json")
    assert ended.returncode == 3
    assert [finding["part"] for finding in json.loads(ended.stdout)["checkpoints"][0]["findings"]] == files
    assert unbroken("seal", folder).returncode == 3


@pytest.mark.promise("X6")
def test_diff_names_the_tensor_that_changed_and_the_file_that_changed(unbroken: Tool, tmp_path: Path) -> None:
    for step, changed in ((1, False), (2, True)):
        folder = tmp_path / f"out/checkpoint-{step}"
        folder.mkdir(parents=True)
        state = weights()
        state["head.bias"][3] += changed
        save_file(state, folder / "model.safetensors")
        torch.save(state, folder / "optimizer.pt")
        assert unbroken("seal", folder).returncode == 0
    ended = unbroken("diff", "out@1", "out@2")
    assert ended.returncode == 3
    assert ended.stdout.splitlines() == [
        "differs  head.bias: other bytes",
        "differs  optimizer.pt: 1 of 1 blocks differ",
        "2 items differ, 2 are equal",
    ]


@pytest.mark.promise("X6")
def test_sealed_folders_are_kept_and_pruned_and_foreign_ones_survive(
    unbroken: Tool, written: Path, tmp_path: Path
) -> None:
    outputs = tmp_path / "outputs"
    for step, loss in ((100, 2.0), (200, 1.0), (300, 3.0), (400, 2.5)):
        shutil.copytree(written / "plain torch.save" / f"step_{STEP}", outputs / f"checkpoint-{step}")
        assert unbroken("seal", outputs / f"checkpoint-{step}", "--metric", f"loss={loss}").returncode == 0
    shutil.copytree(written / "plain torch.save" / f"step_{STEP}", outputs / "mine")
    (outputs / "latest").write_text("global_step400")
    ended = unbroken("prune", "outputs", "--keep-last-k", "1", "--keep-best", "loss", "--json")
    assert json.loads(ended.stdout)["removed"] == ["checkpoint-100", "checkpoint-300"]
    assert sorted(path.name for path in outputs.iterdir()) == ["checkpoint-200", "checkpoint-400", "latest", "mine"]
    assert (outputs / "latest").read_text() == "global_step400"
    assert same(torch.load(outputs / "checkpoint-200" / "model.pt", weights_only=True))


def test_what_stock_torch_loads_silently_verify_finds(unbroken: Tool, written: Path, tmp_path: Path) -> None:
    name = FOLDERS["torch DCP"][0]
    folder = tmp_path / name
    shutil.copytree(written / "torch DCP" / name, folder)
    assert unbroken("seal", folder).returncode == 0
    shard = next(folder.glob("*.distcp"))
    data = bytearray(shard.read_bytes())
    at = data.index(weights()["embed.weight"].numpy().tobytes()[:64])
    data[at + 5] ^= 0x01
    shard.write_bytes(data)
    assert not same(_load_dcp(folder))
    ended = unbroken("verify", folder, "--full")
    assert ended.returncode == 3 and shard.name in ended.stdout


def test_prune_never_removes_a_run_nor_the_folder_it_names(unbroken: Tool, tmp_path: Path) -> None:
    for run in ("run1", "run2", "best-step-9"):
        (tmp_path / run).mkdir()
        (tmp_path / run / "weights.pt").write_bytes(b"1")
        # As an earlier version sealed them, before anything in them was known to be a checkpoint.
        seal(Store(tmp_path), run, at_ns=1, step={"run1": 1, "run2": 2}.get(run, 9))
    (tmp_path / "run1" / "checkpoints" / "checkpoint-5").mkdir(parents=True)
    (tmp_path / "run2" / "journal").mkdir()
    before = sorted(tmp_path.rglob("*"))
    ended = unbroken("prune", "run1", "--keep-last-k", "1")
    assert ended.returncode == 0 and sorted(tmp_path.rglob("*")) == before
    assert ["skip", "run1"] in [line.split()[:2] for line in ended.stdout.splitlines()]
    assert ["skip", "run2"] in [line.split()[:2] for line in ended.stdout.splitlines()]
    ended = unbroken("prune", ".", "--keep-last-k", "1")
    assert ended.returncode == 0 and sorted(tmp_path.rglob("*")) == before
    assert ["skip", "run1"] in [line.split()[:2] for line in ended.stdout.splitlines()]


def test_what_an_error_proposes_for_unsealed_folders_works(unbroken: Tool, tmp_path: Path) -> None:
    for step in (5, 6):
        (tmp_path / f"run1/checkpoints/checkpoint-{step}").mkdir(parents=True)
        (tmp_path / f"run1/checkpoints/checkpoint-{step}/m.pt").write_bytes(b"1")
    (tmp_path / "m2.pt").write_bytes(b"1")
    for argument in ("run1", "m2.pt"):
        ended = unbroken("seal", argument, "--json")
        assert ended.returncode == 2, ended
        command = json.loads(ended.stdout)["help"][0]["command"]
        for words in (part.split() for part in command.split(" && ")):
            if words[0] == "unbroken":
                assert unbroken(*words[1:]).returncode == 0, command
            else:
                subprocess.run(words, cwd=tmp_path, check=True)
    assert unbroken("verify", "run1", "--full").returncode == 0
    assert unbroken("verify", "step-1000", "--full").returncode == 0


def test_sealing_all_twice_verifies(unbroken: Tool, tmp_path: Path) -> None:
    for step in (5, 6):
        (tmp_path / f"out/checkpoint-{step}").mkdir(parents=True)
        (tmp_path / f"out/checkpoint-{step}/m.pt").write_bytes(b"1")
    assert unbroken("seal", "out", "--all").returncode == 0
    again = unbroken("seal", "out", "--all")
    assert (again.returncode, again.stdout) == (
        0,
        "ok      out  2 checkpoints already sealed, all checksums verified\n",
    )
    (tmp_path / "out/checkpoint-6/m.pt").write_bytes(b"2")
    assert unbroken("seal", "out", "--all").returncode == 3
    (tmp_path / "none").mkdir()
    nothing = unbroken("seal", "none", "--all")
    assert nothing.returncode == 2
    assert nothing.stderr.startswith("error[cannot-seal]")
