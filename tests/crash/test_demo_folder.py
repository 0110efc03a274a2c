"""The folder of a demo, under every crash and every power cut: the next demo takes it, and never anything else."""

from pathlib import Path

import pytest

from unbroken.disk import Disk
from unbroken.files import Files
from unbroken.prove.demo_setup import DemoFolder, config_text, prepare
from unbroken.records.lease import Holder
from unbroken.testing import ERRORS, KILLS, MemoryDisk, crash_points, crash_states

PLACES = DemoFolder(Path("/somewhere/demo"))
HOLDER = Holder("here", 7, "77")


def prepares(disk: Disk) -> None:
    prepare(PLACES.folder, holder=HOLDER, now_s=1.0, process_of=lambda holder: "", files=Files(disk))


def nothing_yet() -> MemoryDisk:
    return MemoryDisk(["/somewhere"])


def with_an_earlier_demo() -> MemoryDisk:
    disk = nothing_yet()
    prepares(disk)
    files = Files(disk)
    files.make_directory(PLACES.chained, durable=True)
    files.write_new(PLACES.chained / "config.json", [b"{}"])
    files.write_new(PLACES.tokenizer, [b"{}"])
    return disk


@pytest.mark.promise("X7")
@pytest.mark.parametrize("before", [nothing_yet, with_an_earlier_demo])
def test_after_any_kill_the_next_demo_starts_over_in_the_same_folder(before: object) -> None:
    assert callable(before)
    for trial in crash_points(before, prepares, (*KILLS, *ERRORS)):
        for words, disk in (("as it stands", trial.disk), *crash_states(trial.disk)):
            prepares(disk)
            files = Files(disk)
            found = files.read_bytes(PLACES.config, limit_bytes=1 << 20)
            assert found == config_text(PLACES).encode(), f"{trial}, {words}"
            assert files.find(PLACES.chained) is None and files.find(PLACES.tokenizer) is None
