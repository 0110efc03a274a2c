"""Connecting over gloo, without processes; with real ones in tests/distributed/test_connection.py."""

import threading

import pytest
from torch.distributed import HashStore, PrefixStore

from unbroken.connection import _FAILED, _unless_another_failed


def test_a_rank_gives_up_as_soon_as_another_could_not_connect() -> None:
    attempt = PrefixStore("0", HashStore())
    attempt.set(_FAILED, "rank 1: refused")
    is_over = threading.Event()
    try:
        with pytest.raises(RuntimeError, match="another rank"):
            _unless_another_failed(is_over.wait, attempt, seconds=3.0)
    finally:
        is_over.set()
