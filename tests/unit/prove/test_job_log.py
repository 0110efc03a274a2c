"""What is shown of a job's log: what its ranks said, not how torchrun tells of it."""

from unbroken.prove.job_process import own_words

ACCOUNT = [
    b"W1115 11:08:18 32534 torch/distributed/elastic/multiprocessing/api.py:1028] Sending process 7 closing signal",
    b"E1115 11:08:18 32534 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: 1) of python",
    b"Traceback (most recent call last):",
    b"torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ",
    b"=" * 60,
    b"train.py FAILED",
    b"  exitcode  : 1 (pid: 8)",
    b"=" * 60,
]


def test_the_error_of_a_rank_is_shown_above_the_report_of_torchrun() -> None:
    said, after = [b"ValueError: my own bug"], [b"unbroken run: its own exit code stands"]
    assert own_words([*said, *ACCOUNT, *after, *said, *ACCOUNT]) == [*said, *after, *said]


def test_a_log_without_such_an_account_is_shown_as_it_is() -> None:
    lines = [b"=" * 60, b"a title", b"=" * 60, b"Traceback (most recent call last):", b"ValueError: my own bug"]
    assert own_words(lines) == lines
    assert own_words([]) == []


def test_an_account_of_torchrun_alone_is_better_than_nothing() -> None:
    assert own_words(ACCOUNT) == ACCOUNT
