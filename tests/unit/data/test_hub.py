"""A tokenizer by its name: from the hub, from what it left on this machine, or refused at once."""

import logging
import socket
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from unbroken.data.ingest import encoders
from unbroken.data.ingest.encoders import find_tokenizer
from unbroken.errors import TokenizerUnknown

PROXIES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> str:
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
    return place


def keep(monkeypatch: pytest.MonkeyPatch, path: str | None) -> None:
    """What the hub is said to have left on this machine."""
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda name, file: path)


def give(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """A hub that gives a tokenizer after some time."""

    def from_pretrained(name: str) -> SimpleNamespace:
        time.sleep(seconds)
        return SimpleNamespace(to_str=lambda: name)

    monkeypatch.setattr("tokenizers.Tokenizer", SimpleNamespace(from_pretrained=from_pretrained))


def test_an_unreachable_hub_is_not_waited_for(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    keep(monkeypatch, None)
    began = time.monotonic()
    with pytest.raises(TokenizerUnknown) as refusal:
        find_tokenizer("gpt2")
    assert time.monotonic() - began < 5
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


def test_a_hub_that_takes_its_time_is_named_and_one_that_answers_is_not(
    endpoint: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(encoders, "_unreachable", lambda place: None)
    monkeypatch.setattr(encoders, "_QUIET_S", 0.2)
    with caplog.at_level(logging.WARNING, logger="unbroken.data.ingest.encoders"):
        give(monkeypatch, 0.0)
        assert find_tokenizer("gpt2").content == b"gpt2"
        time.sleep(0.3)
        assert caplog.messages == []
        give(monkeypatch, 0.6)
        assert find_tokenizer("gpt2").content == b"gpt2"
    [said] = caplog.messages
    assert said.startswith(f"waiting for {endpoint}: downloading tokenizer 'gpt2' (HF_HUB_OFFLINE=1")


def test_behind_a_proxy_nothing_is_concluded_from_a_direct_knock(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    give(monkeypatch, 0.0)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    assert find_tokenizer("gpt2").content == b"gpt2"
