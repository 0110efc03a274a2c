"""What the Trainer logs for a step comes one by one, and all of it is recorded."""

from collections.abc import Mapping
from types import SimpleNamespace

from unbroken.frameworks.trainer_job import TrainerJob


class Records:
    """What a recorder is given."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.shown: dict[str, object] = {}

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        self.rows.append((step, dict(values)))

    def snapshot(self, **changes: object) -> None:
        self.shown |= changes

    def flush(self, *, durable: bool) -> None:
        del durable


def test_what_is_logged_after_the_records_of_a_step_were_written_is_written_too() -> None:
    records, job = Records(), TrainerJob.__new__(TrainerJob)
    job.run = SimpleNamespace(recorder=records)  # type: ignore[assignment]
    job._logged, job._unwritten, job._logged_step = {}, {}, 0
    job.log(4, {"loss": 0.5, "epoch": 1.0})
    job._flush_metrics(4, durable=True)
    job.log(4, {"eval_loss": 0.25, "eval_runtime": 3.0})
    job.log(4, {"train_runtime": 9.0})
    job.log(5, {"loss": 0.4})
    job._flush_metrics(5)
    job._flush_metrics(5)
    assert records.rows == [(4, {"loss": 0.5, "epoch": 1.0}), (4, {"eval_loss": 0.25}), (5, {"loss": 0.4})]
    assert records.shown == {"loss": 0.4, "loss_step": 5}
