"""The failure that is recorded is the first one, and not what the other ranks see of it."""

import time
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.distributed.echo_world import train
from unbroken.errors import PeerLost, RankFailed, RankRaised
from unbroken.loop.peers import lost_connection
from unbroken.records.layout import Layout
from unbroken.records.outcome import Outcome, read_outcome
from unbroken.records.process import process_of
from unbroken.testing.worlds import Ended, logs, spawn

GLOO = "[/src/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.7]:41532"


def ended(run: Path, what: str, victim: int, wrap: str = "ddp", size: int = 2) -> tuple[list[Ended], Outcome]:
    ranks = spawn(size, train, str(run), what, victim, wrap)
    outcome = read_outcome(Layout(run), now_s=time.time(), process_of=process_of)
    assert outcome is not None and not any(each.is_late for each in ranks), logs(ranks)
    return ranks, outcome


@pytest.mark.promise("U5")
@pytest.mark.parametrize(("wrap", "size"), [("ddp", 2), ("fsdp", 2), ("ddp", 3)])
def test_a_rank_that_is_killed_inside_backward_is_a_lost_peer(tmp_path: Path, wrap: str, size: int) -> None:
    ranks, outcome = ended(tmp_path / "run", "kill", 1, wrap, size)
    assert (outcome.status, outcome.verdict) == ("error", "again"), logs(ranks)
    assert outcome.reason.startswith("peer-lost: rank 1 is gone"), outcome.reason
    assert all(isinstance(each.error, PeerLost) and each.error.lost == 1 for each in ranks if each.rank != 1)


@pytest.mark.promise("U5")
def test_the_first_rank_killed_inside_backward_is_a_crash_to_be_started_again(tmp_path: Path) -> None:
    ranks, outcome = ended(tmp_path / "run", "kill", 0)
    assert (outcome.status, outcome.verdict) == ("crashed", "again"), logs(ranks)
    assert isinstance(ranks[1].error, PeerLost) and ranks[1].error.lost == 0, logs(ranks)


@pytest.mark.promise("U5")
@pytest.mark.parametrize(("victim", "wrap"), [(1, "ddp"), (0, "ddp"), (1, "fsdp")])
def test_an_exception_inside_backward_is_recorded_with_its_rank(tmp_path: Path, victim: int, wrap: str) -> None:
    ranks, outcome = ended(tmp_path / "run", "raise", victim, wrap)
    assert (outcome.status, outcome.verdict, outcome.exit_code) == ("error", "look", 1), logs(ranks)
    assert "ValueError: the label is 1001 of 1000" in outcome.reason
    assert victim == 0 or outcome.reason.startswith("rank-raised: rank 1 ")
    other = ranks[1 - victim].error
    assert isinstance(other, RankRaised) and (other.rank, other.verdict) == (victim, "look"), logs(ranks)


@pytest.mark.promise("U5")
def test_a_rank_that_leaves_by_itself_gives_its_exit_code(tmp_path: Path) -> None:
    ranks, outcome = ended(tmp_path / "run", "exit", 1)
    assert (outcome.status, outcome.verdict, outcome.exit_code) == ("error", "look", 3), logs(ranks)


@pytest.mark.promise("U5")
@pytest.mark.parametrize(
    ("error", "is_lost"),
    [
        (RuntimeError(GLOO), True),
        (
            RuntimeError("[/src/gloo/gloo/transport/tcp/buffer.cc:78] Timed out waiting 1800000ms for recv"),
            True,
        ),
        (
            dist.DistBackendError("NCCL error: remote process exited or there was a network error"),
            True,
        ),
        (dist.DistNetworkError("failed to recv, got 0 bytes"), True),
        (PeerLost(rank=0, symptom="closed"), True),
        (RankFailed(rank=2, cause=PeerLost(rank=2, symptom="closed")), True),
        (dist.DistBackendError("NCCL error: invalid usage (run with NCCL_DEBUG=WARN for details)"), False),
        (RuntimeError("gloo: the tensors differ in size"), False),
        (RuntimeError("CUDA error: out of memory"), False),
        (ConnectionResetError("a database of the script's own closed the connection"), False),
        (TimeoutError("timed out"), False),
    ],
)
def test_only_what_torch_says_of_a_lost_peer_is_one(error: BaseException, is_lost: bool) -> None:
    assert (lost_connection(error) is not None) == is_lost
    wrapped = KeyError("of the script's own")
    wrapped.__cause__ = error
    assert (lost_connection(wrapped) is not None) == is_lost
