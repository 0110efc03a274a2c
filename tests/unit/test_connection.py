"""Connecting over gloo, without processes; with real ones in tests/distributed/test_connection.py."""

import threading
from pathlib import Path

import pytest

from unbroken.connection import _FAILED, _unless_another_failed
from unbroken.torch_private import FileStore, PrefixStore


def test_a_rank_gives_up_as_soon_as_another_could_not_connect(tmp_path: Path) -> None:
    attempt = PrefixStore("0", FileStore(str(tmp_path / "store"), 1))
    attempt.set(_FAILED, "rank 1: refused")
    is_over = threading.Event()
    try:
        with pytest.raises(RuntimeError, match="another rank"):
            _unless_another_failed(is_over.wait, attempt, seconds=3.0)
    finally:
        is_over.set()
