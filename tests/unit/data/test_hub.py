"""A tokenizer by its name: from the hub, from what it left on this machine, or refused at once."""

import logging
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.patience import PATIENCE_S
from unbroken.data.ingest import encoders
from unbroken.data.ingest.encoders import find_tokenizer
from unbroken.errors import TokenizerUnknown

PROXIES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A place at which nobody listens."""
    constants = pytest.importorskip("huggingface_hub.constants")
    for name in PROXIES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        place = f"http://127.0.0.1:{held.getsockname()[1]}"
        monkeypatch.setattr(constants, "ENDPOINT", place)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        # Bound, so that nobody else can listen there meanwhile.
        yield place


def keep(monkeypatch: pytest.MonkeyPatch, path: str | None) -> None:
    """What the hub is said to have left on this machine."""
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda name, file: path)


def give(monkeypatch: pytest.MonkeyPatch, after: threading.Event | None = None) -> list[str]:
    """A hub that gives a tokenizer, if need be after something has happened; returns what it is asked for."""
    asked: list[str] = []

    def from_pretrained(name: str) -> SimpleNamespace:
        asked.append(name)
        assert after is None or after.wait(PATIENCE_S)
        return SimpleNamespace(to_str=lambda: name)

    monkeypatch.setattr("tokenizers.Tokenizer", SimpleNamespace(from_pretrained=from_pretrained))
    return asked


def test_an_unreachable_hub_is_not_waited_for(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    keep(monkeypatch, None)
    asked, attempts = give(monkeypatch), []
    connect = socket.create_connection

    def counting(place: tuple[str, int], timeout: float) -> socket.socket:
        attempts.append(place)
        return connect(place, timeout)

    monkeypatch.setattr(socket, "create_connection", counting)
    with pytest.raises(TokenizerUnknown) as refusal:
        find_tokenizer("gpt2")
    # The client would try again and again for half a minute.
    assert len(attempts) == 1 and asked == []
    assert f"it is not in the local cache, and {endpoint} is not used: Connection refused" in refusal.value.reason


@pytest.mark.parametrize("is_offline", [True, False])
def test_the_cache_is_used_when_the_hub_is_unreachable(
    endpoint: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_offline: bool
) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.save(str(tmp_path / "tokenizer.json"))
    keep(monkeypatch, str(tmp_path / "tokenizer.json"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", is_offline)
    assert find_tokenizer("own/name").content == made.to_str().encode()


def test_a_name_that_no_hub_could_have_is_refused_with_a_reason(endpoint: str) -> None:
    with pytest.raises(TokenizerUnknown) as refusal:
        find_tokenizer("not a name!")
    assert "it could not be downloaded: " in refusal.value.reason


def pending() -> list[threading.Timer]:
    """The timers that wait to name a hub."""
    timers = [each for each in threading.enumerate() if isinstance(each, threading.Timer)]
    return [each for each in timers if each.function == encoders._log.warning]


def test_a_hub_that_takes_its_time_is_named_and_one_that_answers_is_not(
    endpoint: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(encoders, "_unreachable", lambda place: None)
    monkeypatch.setattr(encoders, "_QUIET_S", PATIENCE_S)
    heard = threading.Event()
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", lambda record: heard.set())
    with caplog.at_level(logging.WARNING, logger="unbroken.data.ingest.encoders"):
        give(monkeypatch)
        assert find_tokenizer("gpt2").content == b"gpt2"
        assert all(timer.finished.is_set() for timer in pending()), "it would be named later"
        assert caplog.messages == []
        monkeypatch.setattr(encoders, "_QUIET_S", 0.05)
        give(monkeypatch, heard)
        # Behind that of `caplog`, which has the record when this one is called.
        logging.getLogger().addHandler(handler)
        try:
            assert find_tokenizer("gpt2").content == b"gpt2"
        finally:
            logging.getLogger().removeHandler(handler)
    [said] = caplog.messages
    assert said.startswith(f"waiting for {endpoint}: downloading tokenizer 'gpt2' (HF_HUB_OFFLINE=1")


def test_behind_a_proxy_nothing_is_concluded_from_a_direct_knock(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    give(monkeypatch)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    assert find_tokenizer("gpt2").content == b"gpt2"
