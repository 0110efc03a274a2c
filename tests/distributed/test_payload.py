"""Worlds of one to four ranks, real processes over gloo, save and load and reshard each other's checkpoints."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict_loader import load as load_stock

from tests.distributed.payload_world import CHECKS, RANKS, run_checks, whole_tensors
from tests.patience import PATIENCE_S
from tests.unit.state.payloads import same_bits
from unbroken.testing.worlds import logs, spawn

ROOT = Path(__file__).resolve().parents[2]
SEARCHED = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": SEARCHED}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory in which four ranks have gone through all checks."""
    root = tmp_path_factory.mktemp("world")
    ended = spawn(RANKS, run_checks, str(root))
    # A rank that failed a check alone leaves the others waiting: its own traceback is in its log.
    assert all(each.is_good for each in ended), logs(ended, last=10_000)
    return root


@pytest.mark.parametrize("name", CHECKS)
def test_on_every_rank(world: Path, name: str) -> None:
    for rank in range(RANKS):
        found = json.loads((world / f"{rank}.json").read_text())
        assert found[name] is None, f"rank {rank}: {found[name]}"


Nested = dict[str, dict[str, torch.Tensor]]


def gathered() -> Nested:
    """What the world of four held, whole, as a nested state dict."""
    flat = whole_tensors()
    flat |= {"tied.rows": flat["sharded.rows"], "tied.few": flat["sharded.few"]}
    flat |= {f"ranks.{rank}.generator": torch.full((3,), float(rank)) for rank in range(RANKS)}
    nested: Nested = {}
    for name, tensor in flat.items():
        item, _, rest = name.partition(".")
        nested.setdefault(item, {})[rest] = tensor
    return nested


def require_gathered(found: Nested) -> None:
    expected = gathered()
    assert {item: sorted(values) for item, values in found.items()} == {i: sorted(v) for i, v in expected.items()}
    for item, values in expected.items():
        assert [name for name, tensor in values.items() if not same_bits(found[item][name], tensor)] == []


@pytest.fixture
def payload(world: Path) -> Path:
    return world / "reshard" / f"checkpoint-{RANKS}" / "state"


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_stock_load_in_a_single_process_reads_what_a_world_wrote(payload: Path) -> None:
    found = {item: {name: torch.zeros_like(t) for name, t in values.items()} for item, values in gathered().items()}
    load_stock(found, checkpoint_id=str(payload))
    require_gathered(found)


@pytest.mark.promise("M25")
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_stock_conversion_to_one_file_gives_the_gathered_tensors(payload: Path, tmp_path: Path) -> None:
    dcp_to_torch_save(payload, tmp_path / "whole.pt")
    require_gathered(torch.load(tmp_path / "whole.pt", weights_only=True))


@pytest.mark.promise("M25")
def test_the_stock_command_converts_too(payload: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.checkpoint.format_utils", "dcp_to_torch"]
    subprocess.run(
        [*command, str(payload), str(tmp_path / "whole.pt")], check=True, env=ENVIRONMENT, timeout=PATIENCE_S
    )
    require_gathered(torch.load(tmp_path / "whole.pt", weights_only=True))
