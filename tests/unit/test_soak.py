"""The ledger of the soak: what failed is tried again first, what a crash cut is passed by."""

import itertools
import json
from dataclasses import asdict
from pathlib import Path

import pytest

from tools import soak
from tools.soak import COMMANDS, Entry, append, failing, next_proofs, read_ledger

PASSED = Entry("script", 1, "proven", 60.0, 0.0, chains=2, injected=9)
FAILED = Entry("train", 2, "chain 3: other bits", 60.0, 1.0, rerun="unbroken prove --seed 2")


def test_a_ledger_is_read_as_it_was_written_but_for_a_line_that_was_cut(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    assert read_ledger(path) == []
    lines = [json.dumps(asdict(entry)) for entry in (PASSED, FAILED)]
    path.write_text("\n".join([*lines, lines[0][:40]]))
    assert read_ledger(path) == [PASSED, FAILED]


def test_a_proof_that_follows_a_line_that_was_cut_is_not_lost_with_it(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    append(path, PASSED)
    path.write_text(path.read_text() + '{"name": "scr')
    append(path, FAILED)
    append(path, PASSED)
    assert read_ledger(path) == [PASSED, FAILED, PASSED]


def test_what_failed_is_tried_again_even_where_the_hours_are_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger, tried = tmp_path / "ledger.jsonl", []

    def proof(folder: Path, name: str, seed: int, minutes: float) -> Entry:
        tried.append((name, seed))
        return Entry(name, seed, "proven", 60.0, 2.0)

    monkeypatch.setattr(soak, "prepare", lambda folder: None)
    monkeypatch.setattr(soak, "one_proof", proof)
    append(ledger, PASSED)
    append(ledger, FAILED)
    assert soak.soak(tmp_path, 1 / 60) == 0
    assert tried == [("train", 2)]


def test_a_seed_fails_until_its_last_proof_passes() -> None:
    fixed = Entry("train", 2, "proven", 60.0, 2.0)
    assert failing([PASSED, FAILED]) == [FAILED]
    assert failing([PASSED, FAILED, fixed]) == []
    assert failing([fixed, FAILED]) == [FAILED]


def test_what_failed_is_tried_first_and_then_every_command_in_turn_under_new_seeds() -> None:
    found = list(itertools.islice(next_proofs([PASSED, FAILED]), 1 + 2 * len(COMMANDS)))
    assert found[0] == ("train", 2)
    assert [name for name, _ in found[1:]] == [*COMMANDS, *COMMANDS]
    assert len({seed for _, seed in found}) == len(found)
