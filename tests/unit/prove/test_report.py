"""The report of a proof: text and document say the same, and a proof of nothing is none."""

import json
from pathlib import Path

import pytest

from unbroken.prove.baseline import Baseline
from unbroken.prove.chain import ChainReport, JobReport
from unbroken.prove.proof_report import Proof
from unbroken.report.style import Style
from unbroken.testing.exactness import Comparison, FirstDifference, MetricsComparison

PLAIN = Style(color=False)
EQUAL = Comparison(MetricsComparison(40, 40, None, ("loss",)), None, (None, None))
DIFFERS = Comparison(
    MetricsComparison(40, 39, FirstDifference(7, "loss", "0x1p-1", "0x1p-2", 1, 3), ("loss",)), None, (None, None)
)
JOBS = [
    JobReport(2, 0, 12, ("SIGTERM", "then flip"), "stopped", 0, (), "checkpoint-12: bit 5 of a flipped"),
    JobReport(
        1, 9, 40, ("2 to 1 ranks",), "completed", 0, ("checkpoint-12: a: wrong bytes",), None, ("EIO at latest",)
    ),
]


def proof(*chains: ChainReport) -> Proof:
    baseline = Baseline(Path("/proof/uninterrupted"), 40, 2.0, 0.05, 2, 1000)
    words = ("torchrun", "--nproc-per-node", "2", "my train.py")
    found = Proof(words, 7, ("term", "flip"), (2, 1), Path("/proof"), (("full", "needs root"),), baseline)
    found.chains.extend(chains)
    return found


def chain(comparison: Comparison | None, problem: str | None = None) -> ChainReport:
    return ChainReport(3, Path("/proof/chain-0003"), list(JOBS), comparison, 9.0, 3, problem, ("the end",))


def test_a_proof_says_what_was_done_what_was_recovered_and_what_it_cost() -> None:
    found = proof(chain(EQUAL))
    text = found.text(PLAIN)
    for words in (
        "uninterrupted: 40 steps in 2.0 s, twice, with the same bits; chains save every 3 steps",
        "left out: full: needs root",
        "SIGTERM; then flip",
        "after job 1: checkpoint-12: bit 5 of a flipped",
        "job 2 skipped checkpoint-12: a: wrong bytes",
        "job 2 ended before: EIO at latest",
        "equal: 40 of 40 steps agree bit for bit (loss)",
        "3 steps computed again, 9.0 s in all",
        "proven: 1 chain of 2 jobs, 3 faults; every chain equals the uninterrupted run bit for bit (seed 7)",
    ):
        assert words in text
    assert "not proven" not in text


def test_a_chain_with_other_bits_is_not_proven_and_says_how_to_make_it_again() -> None:
    found = proof(chain(EQUAL), chain(DIFFERS))
    text = found.text(PLAIN)
    assert not found.is_proven
    assert "not proven: chain 3 has other bits" in text
    assert "step 7 is the first that differs" in text
    rerun = (
        "unbroken prove --seed 7 --chain 3 --faults term,flip --ranks 2,1 -- torchrun --nproc-per-node 2 'my train.py'"
    )
    assert f"  help {rerun}   repeat it" in text
    assert "  at   /proof/chain-0003" in text
    assert found.json_fields()["chains"][1]["rerun"] == rerun


def test_other_bits_come_with_their_likely_cause_and_equal_ones_with_none() -> None:
    forgetful = chain(DIFFERS)
    forgetful.unsaved = ("optimizer AdamW, called `optimizer`",)
    named = "likely cause: not registered with Run, so not restored at resume: optimizer AdamW, called `optimizer`"
    assert named in proof(forgetful).text(PLAIN)
    assert proof(forgetful).json_fields()["chains"][0]["unsaved"] == list(forgetful.unsaved)
    text = proof(chain(DIFFERS)).text(PLAIN)
    assert "likely cause: uninterrupted runs agree, so a resume does not restore some state" in text
    assert "0x1p-1 (job 1) in the uninterrupted run, 0x1p-2 (job 3) in the chain" in text
    assert "likely cause" not in proof(chain(EQUAL)).text(PLAIN)


def test_a_chain_that_could_not_continue_is_not_proven_whatever_its_bits() -> None:
    for comparison in (EQUAL, None):
        found = proof(chain(comparison, "job 2 ended as error: no usable checkpoint"))
        assert not found.is_proven
        text = found.text(PLAIN)
        assert "failed: job 2 ended as error: no usable checkpoint" in text
        assert "| the end" in text


def test_a_proof_without_a_chain_is_none() -> None:
    assert not proof().is_proven


@pytest.mark.parametrize("comparison", [EQUAL, DIFFERS, None])
def test_the_document_is_json_and_says_what_the_text_says(comparison: Comparison | None) -> None:
    found = proof(chain(comparison))
    facts = json.loads(json.dumps(found.json_fields()))
    assert facts["is_proven"] is found.is_proven is (comparison is EQUAL)
    [results] = facts["chains"]
    assert results["computed_again"] == 3
    assert [job["injected"] for job in results["jobs"]] == [list(job.injected) for job in JOBS]
    assert facts["left_out"] == [{"fault": "full", "reason": "needs root"}]
    assert (results["comparison"] or {}).get("agreeing") == (comparison.agreeing if comparison else None)
