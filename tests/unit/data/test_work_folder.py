"""The records of a tokenization are held to what they say, whoever wrote them, and several processes may want one."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.unit.data.texts import DOCUMENTS, lines, shards
from unbroken.data.ingest import tokenize as tokenizing
from unbroken.data.ingest.request import TokenizeOptions, TokenizeRequest
from unbroken.data.ingest.tokenize import tokenize
from unbroken.data.ingest.train_tokenizer import train_tokenizer
from unbroken.data.ingest.work_folder import FINISHED, WorkFolder
from unbroken.errors import ShardDamaged, TokenizedDifferently
from unbroken.files import LOCAL
from unbroken.store.digest import digest_bytes


@pytest.fixture
def asked(tmp_path: Path) -> TokenizeRequest:
    """A tokenization of one small file."""
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.jsonl").write_bytes(lines(DOCUMENTS))
    return TokenizeRequest(input_dir=tmp_path / "text", output_dir=tmp_path / "out", tokenizer="bytes")


def _begin(asked: TokenizeRequest, monkeypatch: pytest.MonkeyPatch) -> WorkFolder:
    """A tokenization that was killed before its first unit."""

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(tokenizing, "_taken_part", killed)
        with pytest.raises(KeyboardInterrupt):
            tokenize(asked)
    return WorkFolder(LOCAL, asked.output_dir)


def _rewrite(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    body = json.loads(path.read_bytes())["body"]
    change(body)
    data = json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
    path.write_bytes(b'{"body":%s,"digest":"%s"}\n' % (data, digest_bytes(data).hex().encode()))


@pytest.mark.parametrize("name", ["../elsewhere", "/elsewhere", "a/../../b"])
def test_a_plan_that_leads_out_of_its_folder_is_refused(
    name: str, asked: TokenizeRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = _begin(asked, monkeypatch)
    _rewrite(work.plan_path, lambda body: body["units"].append([name, 9, []]))
    with pytest.raises(ShardDamaged, match="leads out of the folder"):
        tokenize(asked)
    _rewrite(work.plan_path, lambda body: body["units"].pop())
    tokenize(asked)


def test_a_record_of_another_version_is_refused_by_name(asked: TokenizeRequest) -> None:
    tokenize(asked)
    _rewrite(asked.output_dir / FINISHED, lambda body: body["options"].update(newer=1))
    with pytest.raises(ShardDamaged, match="another version"):
        tokenize(asked)


def test_a_worker_refuses_a_tokenizer_that_is_not_the_plan_s(
    asked: TokenizeRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, other = (train_tokenizer(asked.input_dir, tmp_path / f"{n}.json", vocab_size=n).path for n in (300, 310))
    asked = TokenizeRequest(asked.input_dir, asked.output_dir, str(own), num_workers=1, accelerate=False)
    work = _begin(asked, monkeypatch)
    plan = work.plan()
    assert plan is not None
    work.tokenizer_path(plan).write_bytes(other.read_bytes())
    with pytest.raises(ShardDamaged, match="not the tokenizer of this tokenization"):
        tokenize(asked)
    assert not shards(asked.output_dir)


def test_whoever_comes_second_with_other_options_is_refused(
    asked: TokenizeRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = WorkFolder.begin

    def beaten(work: WorkFolder, *plan: Any, **more: Any) -> None:  # noqa: ANN401 - as it is called
        monkeypatch.setattr(WorkFolder, "begin", begin)
        _begin(asked, monkeypatch)
        begin(work, *plan, **more)

    monkeypatch.setattr(WorkFolder, "begin", beaten)
    with pytest.raises(TokenizedDifferently):
        tokenize(TokenizeRequest(asked.input_dir, asked.output_dir, "bytes", TokenizeOptions(shard_tokens=100)))
    assert not shards(asked.output_dir)


def test_a_system_that_refuses_another_process_ends_the_wait(
    asked: TokenizeRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", refused)
    with pytest.raises(BlockingIOError):
        tokenize(TokenizeRequest(asked.input_dir, asked.output_dir, "bytes", num_workers=1))
