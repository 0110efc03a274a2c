"""A notice concerns one node: whichever hears it, all ranks save and stop at the same step, and resume exactly."""

import time
from pathlib import Path

from tests.distributed.spot_world import listen_and_train
from tests.distributed.training_world import Job, exact, train
from tests.e2e.clouds import serving
from tests.patience import PATIENCE_S
from unbroken.records.journal import read_history
from unbroken.records.layout import Layout
from unbroken.records.outcome import read_outcome
from unbroken.testing.worlds import logs, spawn, start


def test_all_ranks_stop_by_a_notice_that_only_another_node_got_and_resume_exactly(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with serving("aws") as calm, serving("aws") as doomed:
        job = Job(str(run), total=1_000_000, pause_s=0.02, save_steps=None)
        with start(2, listen_and_train, job, (calm.address, doomed.address)) as ranks:
            until_s = time.monotonic() + PATIENCE_S
            while not (calm.asked and doomed.asked):
                assert time.monotonic() < until_s and not ranks.is_over()
                time.sleep(0.01)
            doomed.announce()
            ended = ranks.wait()
        assert all(each.is_good for each in ended), logs(ended)
        steps = {each.value["step"] for each in ended}
        assert len(steps) == 1 and all(each.value["is_stopped"] for each in ended)
        assert {address[1] for each in ended for address in each.value["went"]} >= {calm.port, doomed.port}
    outcome = read_outcome(Layout(run), now_s=time.time())
    assert outcome is not None and (outcome.status, outcome.verdict) == ("stopped", "again")
    (stop,) = read_history(Layout(run)).of_kind("stop")
    assert stop.values["by"] == "spot" and "AWS" in stop.values["reason"]
    target = steps.pop() + 2
    resumed = spawn(2, train, Job(str(run), total=target, save_steps=None))
    whole = spawn(2, train, Job(str(tmp_path / "one"), total=target, save_steps=None))
    assert all(each.is_good for each in (*resumed, *whole)), logs([*resumed, *whole])
    assert all(each.value["resumed_from"].endswith("-shutdown") for each in resumed)
    assert [exact(each.value) for each in resumed] == [exact(each.value) for each in whole]
