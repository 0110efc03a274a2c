"""Where a scheduler has placed a job, and what is said when clocks differ."""

from unbroken.records.deadline import skew_sentence
from unbroken.records.journal import Event
from unbroken.records.process import Placement, placement, placements


def test_outside_of_a_scheduler_there_is_no_placement() -> None:
    assert placement({}) is None
    assert placement({"SLURM_JOB_ID": ""}) is None


def test_a_job_is_called_as_slurm_calls_it() -> None:
    assert placement({"SLURM_JOB_ID": "12"}) == Placement("slurm", "12")
    task = {"SLURM_JOB_ID": "14", "SLURM_ARRAY_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": "3"}
    found = placement({**task, "SLURM_RESTART_COUNT": "2", "SLURM_JOB_NODELIST": "n[1-2]"})
    assert found == Placement("slurm", "12_3", 2, "n[1-2]")
    assert found.sentence() == "12_3 on n[1-2], requeued 2 times"
    assert Placement("slurm", "12", 1, "n1").sentence() == "12 on n1, requeued once"


def test_the_chain_is_read_back_from_the_journal_and_what_is_damaged_is_passed_by() -> None:
    first, second = Placement("slurm", "12", 0, "n1"), Placement("slurm", "12", 1, None)
    facts = [
        Event(1, "job-start", 0.0, {"placement": first.as_json()}),
        Event(2, "job-start", 0.0, {"placement": None}),
        Event(3, "job-start", 0.0, {"placement": {"scheduler": "slurm", "id": 12}}),
        Event(4, "job-start", 0.0, {"placement": second.as_json()}),
        Event(4, "stop", 0.0, {"placement": first.as_json()}),
    ]
    assert placements(facts) == ((1, first), (4, second))


def test_clocks_that_differ_are_reported_with_the_rank_and_the_way() -> None:
    hosts = ["n1", "n2", "n3"]
    assert skew_sentence([100.0, 103.0, 98.0], hosts) is None
    assert skew_sentence([100.0], ["n1"]) is None
    said = skew_sentence([1000.0, 1042.0, 990.0], hosts)
    assert said is not None and {"n2", "42"} <= set(said.split()) and "n3" not in said
    behind = skew_sentence([1000.0, 1000.0, 400.0], hosts)
    assert behind is not None and {"n3", "10", "behind"} <= set(behind.split())
