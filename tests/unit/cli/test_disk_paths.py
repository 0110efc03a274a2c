"""Arguments that are paths on a disk: an address is refused before a ``Path`` loses one of its slashes."""

import json
from pathlib import Path

import pytest

from unbroken.cli.main import main

ADDRESS = "s3://bucket/a"


@pytest.mark.parametrize(
    "words",
    [
        ["init", "-o", ADDRESS],
        ["seal", ADDRESS],
        ["export", "runs/a", "--output", ADDRESS],
        ["tokenize", "--input-dir", "text", "--output-dir", ADDRESS, "--tokenizer-path", "bytes"],
        ["data", "inspect", ADDRESS],
    ],
    ids=lambda words: words[0],
)
def test_an_address_is_no_path_on_a_disk(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    # Left by an earlier command, it would be written to.
    (tmp_path / "s3:" / "bucket").mkdir(parents=True)
    assert main([*words, "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["kind"] == "bad-usage"
    assert list((tmp_path / "s3:" / "bucket").iterdir()) == []


def test_a_directory_whose_name_looks_like_an_address_can_be_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s3:").mkdir()
    assert main(["init", "-o", "./s3:/a.yaml"]) == 0
    assert (tmp_path / "s3:" / "a.yaml").is_file()
