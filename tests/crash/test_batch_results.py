"""The answers of a batch under every crash and every power cut: the old file or the new one, never a part."""

from pathlib import Path

from unbroken.cli.model_options import write_lines
from unbroken.disk import Disk
from unbroken.files import Files
from unbroken.testing import ERRORS, KILLS, MemoryDisk, crash_points, crash_states

TARGET = Path("/out/answers.jsonl")
OLD = b'{"text": "old"}\n'


def with_old_answers() -> MemoryDisk:
    """Where an earlier batch wrote its answers, and a later one was killed."""
    disk = MemoryDisk(["/out"])
    files = Files(disk)
    files.replace(TARGET, OLD, scratch=".scratch")
    files.write_new(TARGET.with_name(".answers.jsonl.partial"), [b"half"])
    return disk


def answers(disk: Disk) -> None:
    write_lines(TARGET, [{"text": "new"}, {"text": "newer"}], Files(disk))


def test_an_output_is_the_old_one_or_the_new_one() -> None:
    undisturbed = with_old_answers()
    answers(undisturbed)
    new = Files(undisturbed).read_bytes(TARGET, limit_bytes=1000)
    assert new == b'{"text": "new"}\n{"text": "newer"}\n'
    for trial in crash_points(with_old_answers, answers, (*KILLS, *ERRORS)):
        assert Files(trial.disk).read_bytes(TARGET, limit_bytes=1000) in (OLD, new), str(trial)
        for words, state in crash_states(trial.disk):
            assert Files(state).read_bytes(TARGET, limit_bytes=1000) in (OLD, new), f"{trial}, {words}"
        if trial.is_finished:
            assert Files(trial.disk).read_bytes(TARGET, limit_bytes=1000) == new
