"""The self-test says exact where it is and not exact where it is not, and disturbs nobody."""

import hashlib
import itertools
import json
import logging
import os
import random
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import nn

import unbroken
from tests.patience import PATIENCE_S
from tests.torch_versions import NO_SHARDED_SUM
from unbroken import exact
from unbroken.doctor.self_test_process import Combination, SelfTestReport, cache_folder, keep
from unbroken.errors import NotExactHere
from unbroken.exact import self_tested
from unbroken.exact.self_test import COUNTS, DTYPES, KNOWN_SUM, LAYOUTS, compare, known_gradients
from unbroken.testing.worlds import logs, spawn


@pytest.fixture(autouse=True)
def _unpinned() -> Iterator[None]:
    yield
    torch.use_deterministic_algorithms(False)
    self_tested._asked.clear()
    self_tested._found.clear()


@pytest.fixture
def switched_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The self-test as users have it, with an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("UNBROKEN_SELF_TEST", "on")
    return tmp_path / "cache"


# ---- the known bits ----


def _rounded(value: float) -> float:
    return float(struct.unpack("<f", struct.pack("<f", value))[0])


def _summed(lanes: Sequence[Sequence[float]]) -> str:
    # Adding two float32 in float64 and rounding once gives the float32 sum: float64 has more than twice the bits.
    total = list(lanes[0])
    for lane in lanes[1:]:
        total = [_rounded(one + other) for one, other in zip(total, lane, strict=True)]
    total = [_rounded(each / sum(COUNTS)) for each in total]
    return hashlib.sha256(struct.pack(f"<{len(total)}f", *total)).hexdigest()


@pytest.mark.promise("X1")
def test_the_known_sum_is_the_fold_in_lane_order_computed_without_torch() -> None:
    assert _summed(known_gradients()) == KNOWN_SUM


def test_no_other_order_of_the_lanes_has_the_known_bits() -> None:
    lanes = known_gradients()
    orders = {
        order for order in itertools.permutations(range(len(lanes))) if _summed([lanes[n] for n in order]) == KNOWN_SUM
    }
    # The first addition is that of two numbers: it does not see their order.
    assert orders == {(0, 1, 2, 3, 4), (1, 0, 2, 3, 4)}


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_every_precision_holds_the_gradients_exactly(dtype: torch.dtype) -> None:
    wide = torch.tensor(known_gradients(), dtype=torch.float64)
    assert torch.equal(wide.to(dtype).double(), wide)
    assert torch.signbit(wide[:, 0]).all() and not wide[:, 0].any()


# ---- verdicts ----

GOOD = {"sum": KNOWN_SUM, "bits": "a"}


def verdicts(**changed: dict[str, str]) -> dict[str, str]:
    """The verdicts where all is well but on the second rank of two, for which cases are given by name."""
    usual = {f"{layout} {dtype}": GOOD for dtype in DTYPES for layout in LAYOUTS}
    given = {name.replace("_", " "): case for name, case in changed.items()}
    found = compare({1: [usual], 2: [usual, {**usual, **given}]})
    return {f"{each['layout']}_{each['dtype']}": each["verdict"] for each in found if each["verdict"] != "exact"}


@pytest.mark.promise("X1")
def test_one_rank_with_other_bits_makes_its_combination_not_exact() -> None:
    assert verdicts() == {}
    assert verdicts(sharded_bfloat16={**GOOD, "bits": "b"}) == {"sharded_bfloat16": "not-exact"}
    assert verdicts(replicated_float32={**GOOD, "sum": "0"}) == {"replicated_float32": "not-exact"}
    assert verdicts(sharded_float32={"error": "late"}) == {"sharded_float32": "not-tested"}
    assert verdicts(sharded_float16={"lacks": "no kernel"}) == {"sharded_float16": "not-available"}


def test_a_rank_without_an_answer_leaves_all_untested() -> None:
    usual = {f"{layout} {dtype}": GOOD for dtype in DTYPES for layout in LAYOUTS}
    assert {each["verdict"] for each in compare({1: ["killed"], 2: [usual, usual]})} == {"not-tested"}
    assert {each["verdict"] for each in compare({1: [usual], 2: [usual, "killed"]})} == {"not-tested"}


# ---- forked processes ----


FORKING = f"""
import json, os, signal, time
from unbroken.exact.forked import Forked, collect

actions = [lambda: {{"a": [1]}}, lambda: int("x", 99), lambda: os.kill(os.getpid(), signal.SIGKILL)]
actions += [lambda: os._exit(7)]
processes = [Forked(action, limit_s={PATIENCE_S}) for action in actions]
collect(processes, limit_s={PATIENCE_S})
late = Forked(lambda: time.sleep(600), limit_s={PATIENCE_S})
collect([late], limit_s=1)
print(json.dumps([[each.answer, each.error] for each in (*processes, late)]))
"""


def test_a_forked_process_answers_raises_ends_or_is_late() -> None:
    # In a process without threads: this one may have some.
    results = json.loads(subprocess.check_output([sys.executable, "-c", FORKING], text=True))
    assert results == [
        [{"a": [1]}, None],
        [None, "ValueError: int() base must be >= 2 and <= 36, or 0"],
        [None, "it was ended by SIGKILL"],
        [None, "it ended with exit code 7"],
        [None, "it did not answer in time"],
    ]


# ---- the whole test, in a copy of the package with a wrong reduction ----


FILE, OLD = "exact/sharded.py", "received.view(self._ranks.size, -1)[: self._round.present]:"
# The last round has a lane for the first rank only: what the second one computed is not to be added.
NEW = "received.view(self._ranks.size, -1):"
SHARDED = "not-exact" if NO_SHARDED_SUM is None else "not-available"


@pytest.mark.promise("X1")
def test_a_wrong_reduction_is_found_in_its_layout_and_in_every_precision(tmp_path: Path) -> None:
    copy = tmp_path / "unbroken"
    shutil.copytree(Path(unbroken.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__"))
    text = (copy / FILE).read_text()
    assert text.count(OLD) == 1
    (copy / FILE).write_text(text.replace(OLD, NEW))
    command = [sys.executable, "-m", "unbroken.exact.self_test", "--device", "cpu"]
    results = subprocess.check_output(command, env={**os.environ, "PYTHONPATH": str(tmp_path)}, text=True)
    found = {(each["layout"], each["dtype"]): each for each in json.loads(results)["combinations"]}
    assert {name: each["verdict"] for name, each in found.items()} == {
        (layout, dtype): SHARDED if layout == "sharded" else "exact" for dtype in DTYPES for layout in LAYOUTS
    }
    if NO_SHARDED_SUM is None:
        because = found["sharded", "float32"]["because"]
        assert because == ["on 2 ranks the sum of the gradients has other bits than defined"]


# ---- pin ----


def _environment() -> dict[str, str]:
    """The environment without what pinning sets, and what torch sets when it imports its compiler."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("CUBLAS_", "TORCHINDUCTOR_"))}


def _pin_undisturbed() -> None:
    """What a rank does that trains exactly; raises if the self-test changed anything of its own."""
    torch.manual_seed(3)
    random.seed(3)
    before = torch.random.get_rng_state(), random.getstate(), _environment()
    exact.pin("cpu")
    assert torch.equal(torch.random.get_rng_state(), before[0])
    assert random.getstate() == before[1] and _environment() == before[2]
    assert torch.get_default_dtype() is torch.float32 and torch.get_num_threads() == 1
    exact.Reducer(nn.Linear(2, 2), lanes=2, seed=0)


@pytest.mark.promise("X1")
def test_two_ranks_test_once_and_the_next_process_not_at_all(switched_on: Path) -> None:
    ended = spawn(2, _pin_undisturbed, env={"LOCAL_WORLD_SIZE": "2"})
    assert all(each.is_good for each in ended), logs(ended)
    folder = switched_on / "unbroken" / "self-test"
    [path] = folder.iterdir()
    written_ns = path.stat().st_mtime_ns
    exact.pin("cpu")
    report = self_tested._found["cpu"]
    assert {each.verdict for each in report.combinations if NO_SHARDED_SUM is None or each.layout != "sharded"} == {
        "exact"
    }
    assert path.stat().st_mtime_ns == written_ns and list(folder.iterdir()) == [path]


def _keep(verdict: str) -> None:
    key = self_tested.make_key(torch.device("cpu"))
    combinations = (
        Combination("replicated", "float32", "exact"),
        Combination("replicated", "bfloat16", verdict, ("on 2 ranks the training has other bits",)),
    )
    assert keep(SelfTestReport(key, combinations), cache_folder())


@pytest.mark.promise("X1")
@pytest.mark.usefixtures("switched_on")
def test_a_combination_that_is_not_exact_here_is_refused_and_others_are_not(caplog: pytest.LogCaptureFixture) -> None:
    _keep("not-exact")
    with caplog.at_level(logging.WARNING):
        exact.pin("cpu")
    assert caplog.messages == ["not exact on this machine: replicated (bfloat16) (unbroken doctor shows what differs)"]
    model = nn.Linear(2, 2)
    with pytest.raises(NotExactHere) as refused:
        exact.Reducer(model, lanes=2, seed=0, compute_dtype=torch.bfloat16)
    assert (refused.value.layout, refused.value.dtype, refused.value.exit_code) == ("replicated", "bfloat16", 6)
    exact.Reducer(model, lanes=2, seed=0)
    exact.Reducer(model, lanes=2, seed=0, compute_dtype=torch.bfloat16, stock=True)


@pytest.mark.usefixtures("switched_on")
def test_a_rank_that_is_not_the_first_of_its_node_does_not_test(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _keep("not-exact")
    # A result of another build is none.
    monkeypatch.setattr(torch.version, "git_version", "another")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    exact.pin("cpu")
    assert not caplog.messages
    exact.Reducer(nn.Linear(2, 2), lanes=2, seed=0, compute_dtype=torch.bfloat16)
    # The first rank has a result by now: it is found when the reducer is made.
    _keep("not-exact")
    with pytest.raises(NotExactHere):
        exact.Reducer(nn.Linear(2, 2), lanes=2, seed=0, compute_dtype=torch.bfloat16)


@pytest.mark.usefixtures("switched_on")
def test_switched_off_or_on_another_kind_of_device_there_is_no_self_test(monkeypatch: pytest.MonkeyPatch) -> None:
    _keep("not-exact")
    exact.pin("cpu")
    monkeypatch.setenv("UNBROKEN_SELF_TEST", "off")
    exact.pin("cpu")
    exact.Reducer(nn.Linear(2, 2), lanes=2, seed=0, compute_dtype=torch.bfloat16)
    monkeypatch.setenv("UNBROKEN_SELF_TEST", "on")
    exact.pin("meta")
    assert "meta" not in self_tested._asked


def test_a_test_that_cannot_run_is_a_warning_and_training_continues(
    switched_on: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with caplog.at_level(logging.WARNING):
        exact.pin("cpu")
    assert ["could not run" in message for message in caplog.messages] == [True]
    exact.Reducer(nn.Linear(2, 2), lanes=2, seed=0)
    assert not list(switched_on.rglob("*.json"))


def test_a_report_about_another_torch_is_not_taken(
    switched_on: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    key = {**self_tested.make_key(torch.device("cpu")), "torch": "2.99.0"}
    results = {
        "key": key,
        "combinations": [{"layout": "replicated", "dtype": "float32", "verdict": "exact", "because": []}],
    }
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho '{json.dumps(results)}'\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with caplog.at_level(logging.WARNING):
        exact.pin("cpu")
    assert [message.endswith("its process has another torch") for message in caplog.messages] == [True]
    assert not self_tested._found and not list(switched_on.rglob("*.json"))
