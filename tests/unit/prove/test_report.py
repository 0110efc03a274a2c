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


def test_a_chain_with_other_bits_fails_and_prints_how_to_reproduce_it() -> None:
    found = proof(chain(EQUAL), chain(DIFFERS))
    assert not found.is_proven
    rerun = (
        "unbroken prove --seed 7 --chain 3 --faults term,flip --ranks 2,1 -- torchrun --nproc-per-node 2 'my train.py'"
    )
    facts = found.json_fields()["chains"][1]
    assert (facts["run"], facts["rerun"]) == ("/proof/chain-0003", rerun)
    assert facts["comparison"]["first"]["step"] == 7


def test_other_bits_come_with_their_likely_cause_and_equal_ones_with_none() -> None:
    forgetful = chain(DIFFERS)
    forgetful.unsaved = ("optimizer AdamW, called `optimizer`",)
    assert proof(forgetful).json_fields()["chains"][0]["unsaved"] == list(forgetful.unsaved)
    assert forgetful.unsaved[0] in proof(forgetful).text(PLAIN)
    # The line of the cause, and what else is said of bits that differ.
    said = [len(proof(chain(found)).text(PLAIN).splitlines()) for found in (EQUAL, DIFFERS)]
    assert said[1] > said[0]


def test_a_chain_that_could_not_continue_fails_whatever_its_bits() -> None:
    for comparison in (EQUAL, None):
        found = proof(chain(comparison, "job 2 ended as error: no usable checkpoint"))
        assert not found.is_proven
        [facts] = found.json_fields()["chains"]
        assert facts["problem"] and facts["log"] == ["the end"] and "the end" in found.text(PLAIN)


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
