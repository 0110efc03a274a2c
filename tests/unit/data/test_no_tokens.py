"""Text of which nothing is left is no data set."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.data.test_tokenize import request
from tests.unit.data.texts import lines, texts_of
from unbroken.data.ingest.request import TokenizeOptions
from unbroken.data.ingest.tokenize import tokenize
from unbroken.errors import NoTokens


def test_text_without_a_token_makes_no_data_set_and_continues_when_there_is_some(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.jsonl").write_bytes(lines(["", "ab", ""]))
    asked = request(tmp_path, options=TokenizeOptions(min_text_length=3))
    with pytest.raises(NoTokens) as refusal:
        tokenize(asked)
    assert refusal.value.left_out == (("empty", 2), ("short", 1))
    assert not [path for path in (tmp_path / "data").rglob("*") if path.is_file() or path.name == ".tokenize"]
    (tmp_path / "text" / "a.jsonl").write_bytes(b"")
    with pytest.raises(NoTokens, check=lambda each: each.left_out == ()):
        tokenize(asked)
    (tmp_path / "text" / "a.jsonl").write_bytes(lines(["abc"]))
    tokenize(asked)
    assert texts_of(tmp_path / "data/train") == ["abc"]
    # A data set that has tokens may be given files that add none.
    (tmp_path / "text" / "b.jsonl").write_bytes(lines([""]))
    assert tokenize(replace(asked, add=True)).totals.skipped == {"empty": 1}
