"""On several ranks too, gradients that a loop uses again are there after a resume, and dropped ones are not saved."""

from pathlib import Path

import pytest

from tests.distributed.standing_gradients_world import TOTAL, interrupted
from unbroken.testing.worlds import logs, spawn

pytestmark = pytest.mark.promise("U3")


@pytest.mark.parametrize("how", ["ddp", "ddp buckets", "fsdp2"])
@pytest.mark.parametrize("loop", ["steps first", "never zeroes", "drops"])
def test_gradients_of_the_step_before_are_there_after_a_resume(tmp_path: Path, how: str, loop: str) -> None:
    ended = spawn(2, interrupted, str(tmp_path), how, loop)
    assert all(each.is_good for each in ended), logs(ended)
    for each in ended:
        assert each.value["is_same"], each.value
        if loop == "drops":
            # Only in the first steps of a job, as long as it is not known what the loop does.
            assert each.value["notices"] == 0
            assert TOTAL not in each.value["stored"] and len(each.value["stored"]) <= 6
        else:
            assert each.value["notices"] == 1
            assert TOTAL in each.value["stored"]
