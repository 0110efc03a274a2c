"""A file system that can be full; where the system allows one."""

import errno
import os
from pathlib import Path

import pytest

from unbroken.prove import small_disk


def test_whoever_cannot_have_one_is_reported_with_the_reason(tmp_path: Path) -> None:
    reason = small_disk.why_not(tmp_path)
    assert reason is None or "root" in reason or "mount failed" in reason
    assert (reason is not None and "root" in reason) == (os.geteuid() != 0)
    assert list(tmp_path.iterdir()) == []


def test_a_small_file_system_is_full_to_the_last_byte_and_free_again(tmp_path: Path) -> None:
    if reason := small_disk.why_not(tmp_path):
        pytest.skip(reason)
    place, kept = tmp_path / "small", tmp_path / "kept"
    place.mkdir()
    with small_disk.mounted(place, 1 << 20):
        (place / "before").write_bytes(b"here")
        assert small_disk.fill(place) > 1 << 19
        with pytest.raises(OSError, match="No space left") as refused:
            (place / "more").write_bytes(bytes(5000))
        assert refused.value.errno == errno.ENOSPC
        small_disk.empty(place)
        (place / "more").write_bytes(bytes(5000))
        small_disk.keep(place, kept)
    assert list(place.iterdir()) == []
    assert (kept / "before").read_bytes() == b"here"
