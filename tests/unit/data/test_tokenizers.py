"""Text stays text, ids mean what an identity says, and a faster engine is believed only while it agrees."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import gigatoken
import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from tests.unit.data.texts import DOCUMENTS, lines
from unbroken.data.ingest import fast_engine
from unbroken.data.ingest.documents import DocumentBatch
from unbroken.data.ingest.encoders import (
    ByteEncoder,
    Encoded,
    ReferenceEncoder,
    TokenizerFile,
    find_tokenizer,
    load_encoder,
)
from unbroken.data.ingest.fast_engine import EnginesDiffer, find_fast_engine
from unbroken.data.ingest.train_tokenizer import train_tokenizer
from unbroken.errors import BadDocuments, NoEodToken, NoTextFound, TokenizerUnknown, WouldOverwrite

HARD = ("<|endoftext|>", "a<|endoftext|>b <|endof", "", " ", "\r\n\t", "it's 東京 🙂", "x" * 5000)


def batch_of(texts: Sequence[str]) -> DocumentBatch:
    batch = DocumentBatch()
    for number, text in enumerate(texts):
        assert batch.add(text, number) is None
    return batch


def rows(encoded: Encoded) -> list[list[int]]:
    return [encoded.of(number).tolist() for number in range(len(encoded.lengths))]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer.json of our own making."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "text").mkdir()
    (folder / "text" / "a.jsonl").write_bytes(lines(DOCUMENTS))
    return train_tokenizer(folder / "text", folder / "tokenizer.json", vocab_size=400).path


def reference_of(path: Path) -> ReferenceEncoder:
    encoder = load_encoder(find_tokenizer(str(path)))
    assert isinstance(encoder, ReferenceEncoder)
    return encoder


# ---- bytes ----


def test_the_bytes_of_a_text_are_its_ids() -> None:
    assert rows(ByteEncoder().encode(batch_of(HARD))) == [list(text.encode()) for text in HARD]


def test_the_identity_of_bytes_never_changes() -> None:
    identity = ByteEncoder.identity
    assert (identity.name, identity.vocab_size, identity.eod_id) == ("bytes", 257, 256)
    assert identity.digest == "b8cbe09adb105bb7f6ccd79e3ea9f6b5"


# ---- the reference ----


def test_the_words_of_a_control_token_stay_words(trained: Path) -> None:
    encoder = reference_of(trained)
    assert encoder.identity.eod_id == 0
    found = rows(encoder.encode(batch_of(HARD)))
    assert not any(encoder.control & set(row) for row in found)
    stock = Tokenizer.from_file(str(trained))
    assert [stock.decode(row, skip_special_tokens=False) for row in found] == list(HARD)
    assert stock.encode(HARD[0]).ids == [0], "without our care it would be the control token"


def test_a_file_that_asks_for_cut_or_filled_texts_gets_neither(trained: Path, tmp_path: Path) -> None:
    stock = Tokenizer.from_file(str(trained))
    stock.enable_truncation(3)
    stock.enable_padding(length=2000)
    stock.save(str(tmp_path / "tokenizer.json"))
    found = reference_of(tmp_path / "tokenizer.json").encode(batch_of(HARD))
    assert rows(found) == rows(reference_of(trained).encode(batch_of(HARD)))


def test_a_tokenizer_is_a_file_or_a_folder_and_its_layout_is_no_part_of_it(trained: Path, tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "tokenizer.json").write_text(json.dumps(json.loads(trained.read_text())))
    (tmp_path / "other.json").write_bytes(trained.read_bytes())
    by_folder, by_file = (load_encoder(find_tokenizer(str(tmp_path / name))) for name in ("own", "other.json"))
    assert by_folder.identity.digest == by_file.identity.digest
    assert (by_folder.identity.name, by_file.identity.name) == ("own", "other.json")


def test_ids_with_holes_count_to_the_largest() -> None:
    stock = Tokenizer(models.WordLevel({"a": 0, "</s>": 900}, unk_token="a"))
    stock.pre_tokenizer = pre_tokenizers.Whitespace()
    encoder = load_encoder(TokenizerFile("own", stock.to_str().encode()))
    assert (encoder.identity.vocab_size, encoder.identity.eod_id) == (901, 900)


def test_a_tokenizer_without_an_end_of_document_is_refused_unless_one_is_named(trained: Path) -> None:
    described = json.loads(trained.read_text())
    described["added_tokens"] = []
    described["model"]["vocab"]["<stop>"] = described["model"]["vocab"].pop("<|endoftext|>")
    file = TokenizerFile("own", json.dumps(described).encode())
    with pytest.raises(NoEodToken) as refusal:
        load_encoder(file)
    assert "</s>" in next(iter(refusal.value.details()))
    assert load_encoder(file, "<stop>").identity.eod_id == 0
    with pytest.raises(NoEodToken, check=lambda lacking: lacking.eod_token == "<halt>"):
        load_encoder(file, "<halt>")
    with pytest.raises(NoEodToken):
        load_encoder(TokenizerFile("bytes", None), "x")


def test_a_tokenizer_that_is_not_there_is_refused_without_asking_the_hub(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for asked in (str(tmp_path / "absent"), str(tmp_path / "empty"), "nowhere/absent.json"):
        with pytest.raises(TokenizerUnknown):
            find_tokenizer(asked)


@pytest.mark.parametrize("content", [b"{}", b"not json", b"\xff\xfe", b'{"model": 3}'])
def test_a_file_that_describes_no_tokenizer_is_refused(content: bytes) -> None:
    with pytest.raises(TokenizerUnknown, match="own"):
        load_encoder(TokenizerFile("own", content))


# ---- training one ----


def test_the_same_text_gives_the_same_tokenizer_whatever_its_format_and_it_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    (tmp_path / "a" / "x.jsonl").write_bytes(lines(DOCUMENTS))
    for number, document in enumerate(DOCUMENTS):
        (tmp_path / "b" / f"{number:03d}.txt").write_bytes(document.encode())
    made = [train_tokenizer(tmp_path / name, tmp_path / f"{name}.json", vocab_size=300) for name in ("a", "b")]
    assert made[0].path.read_bytes() == made[1].path.read_bytes()
    assert {each.vocab_size for each in made} == {300}
    with pytest.raises(WouldOverwrite) as refused:
        train_tokenizer(tmp_path / "a", tmp_path / "a.json", vocab_size=300)
    assert "a-2.json --vocab-size 300" in refused.value.help()[0].command


def test_training_names_bad_documents_and_refuses_an_empty_folder(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines(["x"]) + b"oops\n")
    with pytest.raises(BadDocuments) as refusal:
        train_tokenizer(tmp_path, tmp_path / "out.json", vocab_size=300)
    assert next(iter(refusal.value.details())).startswith("a.jsonl:2: ")
    assert "--skip-bad" not in " ".join(each.command for each in refusal.value.help())
    (tmp_path / "a.jsonl").write_bytes(b"")
    with pytest.raises(NoTextFound):
        train_tokenizer(tmp_path, tmp_path / "out.json", vocab_size=300)
    assert not (tmp_path / "out.json").exists()


# ---- the faster engine ----


def test_the_engine_gives_the_ids_of_the_reference_also_where_control_words_stand(trained: Path) -> None:
    reference = reference_of(trained)
    verdict = find_fast_engine(reference, trained.read_bytes())
    assert verdict.accelerator is not None, verdict.reason
    batch = batch_of([*HARD, *DOCUMENTS, *HARD])
    found = verdict.accelerator.encode(batch)
    assert rows(found) == rows(reference.encode(batch))
    verdict.accelerator.check(batch, found, range(len(batch.texts)))


def test_added_words_that_are_no_control_tokens_are_the_same_by_both(trained: Path) -> None:
    stock = Tokenizer.from_file(str(trained))
    stock.add_tokens([AddedToken("東京"), AddedToken("  ")])
    content = stock.to_str().encode()
    reference = load_encoder(TokenizerFile("own", content))
    assert isinstance(reference, ReferenceEncoder)
    verdict = find_fast_engine(reference, content)
    if verdict.accelerator is not None:
        batch = batch_of(["a  b 東京 c", *DOCUMENTS])
        assert rows(verdict.accelerator.encode(batch)) == rows(reference.encode(batch))


class Lying:
    """An engine that changes the ids of texts that hold a word."""

    def __init__(self, real: gigatoken.Tokenizer, word: bytes) -> None:
        self._real = real
        self._word = word

    def encode_batch(self, texts: list[bytes], *, parallel: bool) -> object:
        return self._real.encode_batch([text.replace(self._word, b"?") for text in texts], parallel=parallel)


@pytest.fixture
def lying(monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes], None]:
    """Makes the engine wrong about one word."""
    real = gigatoken.Tokenizer.from_json

    def plant(word: bytes) -> None:
        monkeypatch.setattr(gigatoken.Tokenizer, "from_json", lambda content: Lying(real(content), word))

    return plant


@pytest.mark.parametrize("length", [1, 3000])
def test_a_difference_in_a_first_document_is_seen_also_in_a_long_one(
    length: int, trained: Path, lying: Callable[[bytes], None]
) -> None:
    lying(b"zebra")
    verdict = find_fast_engine(reference_of(trained), trained.read_bytes())
    assert verdict.accelerator is not None, "the hard texts hold no zebra"
    batch = batch_of(["ok", "zebra " * length])
    found = verdict.accelerator.encode(batch)
    verdict.accelerator.check(batch, found, [0])
    with pytest.raises(EnginesDiffer, match="zebra"):
        verdict.accelerator.check(batch, found, [0, 1])


def test_documents_are_drawn_by_their_own_bytes(trained: Path, lying: Callable[[bytes], None]) -> None:
    lying(b"zebra")
    verdict = find_fast_engine(reference_of(trained), trained.read_bytes())
    assert verdict.accelerator is not None
    batch = batch_of([f"{number} zebra" for number in range(4000)])
    drawn = [text for text in batch.encoded if fast_engine._is_drawn(text)]
    assert 0 < len(drawn) < 20
    with pytest.raises(EnginesDiffer):
        verdict.accelerator.check(batch, verdict.accelerator.encode(batch), [])
    assert [text for text in reversed(batch.encoded) if fast_engine._is_drawn(text)] == drawn[::-1]


def test_an_engine_that_is_wrong_about_a_hard_text_is_never_used(trained: Path, lying: Callable[[bytes], None]) -> None:
    lying("café".encode())
    verdict = find_fast_engine(reference_of(trained), trained.read_bytes())
    assert verdict.accelerator is None
    assert verdict.accelerator is None


def test_an_engine_that_cannot_read_a_tokenizer_reports_it() -> None:
    stock = Tokenizer(models.WordLevel({"a": 0, "</s>": 1}, unk_token="a"))
    stock.pre_tokenizer = pre_tokenizers.Whitespace()
    content = stock.to_str().encode()
    reference = load_encoder(TokenizerFile("own", content))
    assert isinstance(reference, ReferenceEncoder)
    verdict = find_fast_engine(reference, content)
    assert verdict.accelerator is None and verdict.reason


def test_ids_are_laid_end_to_end() -> None:
    encoded = fast_engine._merged(
        Encoded(np.arange(6, dtype=np.uint32), np.array([0, 2, 2, 6])),
        [0, 2],
        Encoded(np.array([9, 8, 7], np.uint32), np.array([0, 1, 3])),
    )
    assert rows(encoded) == [[9], [], [8, 7]]
