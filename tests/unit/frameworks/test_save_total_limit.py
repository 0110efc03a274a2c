"""``save_total_limit`` as a keep policy: as many as the Trainer would keep, and always the best and the newest."""

import subprocess
import sys

import pytest

pytest.importorskip("transformers")

from unbroken.frameworks.trainer_job import SaveTotalLimit
from unbroken.store.keep import Candidate, decide


def kept(limit: int, best: int | None, *steps: int) -> list[int]:
    candidates = [Candidate(f"checkpoint-{step}", step, step) for step in steps]
    policy = SaveTotalLimit(limit, None if best is None else f"checkpoint-{best}")
    return sorted(int(name.split("-")[1]) for name in decide(candidates, (policy,)).kept)


@pytest.mark.promise("C9")
def test_the_best_and_the_newest_are_kept_and_the_limit_is_kept_too() -> None:
    assert kept(2, None, 1, 2, 3, 4) == [3, 4]
    assert kept(2, 1, 1, 2, 3, 4) == [1, 4]
    assert kept(3, 1, 1, 2, 3, 4) == [1, 3, 4]
    assert kept(1, 1, 1, 2, 3, 4) == [1, 4]
    assert kept(2, 4, 1, 2, 3, 4) == [3, 4]
    assert kept(2, 9, 1, 2, 3, 4) == [3, 4]


@pytest.mark.promise("C9", "C11")
def test_importing_unbroken_imports_no_framework() -> None:
    program = (
        "import sys, unbroken; unbroken.Run; import unbroken.frameworks.lightning_events; "
        "print({'transformers', 'accelerate', 'lightning', 'pytorch_lightning'} & {*sys.modules})"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == "set()"
