"""Text in, text out: the right checkpoint, the right tokenizer, and a prompt that becomes the same text every time."""

import json
from pathlib import Path

import pytest
import torch

from tests.unit.gpt.runs import CONFIG, damage, save_averaged, save_run, train_bpe
from unbroken.errors import (
    CheckpointUnknown,
    DamagedCheckpoint,
    DeviceFull,
    DeviceMissing,
    GenerationInvalid,
    NoAverage,
    NoUsableCheckpoint,
    PathMissing,
    SequenceTooLong,
    TokenizerUnknown,
    WrongTokenizer,
)
from unbroken.gpt import Generation, Sampling, TextModel, generate
from unbroken.gpt.checkpoint import find_model
from unbroken.gpt.device import chosen_device, chosen_dtype
from unbroken.gpt.text import TextFinder

GREEDY = Generation(greedy=True, max_new_tokens=12)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "run"
    save_run(path)
    return path


@pytest.mark.promise("G22")
def test_a_prompt_is_continued_as_the_model_continues_its_bytes(tmp_path: Path) -> None:
    model = save_run(tmp_path / "run")
    said = TextModel.open(str(tmp_path / "run")).continue_text("def ", GREEDY)
    ids = generate(model, list(b"def "), max_new_tokens=12, sampling=Sampling(is_greedy=True), known_tokens=257)
    expected = bytes(each for each in ids if each < 256).decode(errors="replace")
    assert said.text == expected
    assert (said.prompt_tokens, said.new_tokens, said.is_ended) == (4, 12, False)


def test_a_named_step_is_the_one_that_is_loaded(run: Path) -> None:
    first, last = (find_model(f"{run}{step}").load(torch.device("cpu")) for step in ("@1", ""))
    assert (first.step, last.step) == (1, 2)
    assert torch.equal(first.model.norm.weight + 0.25, last.model.norm.weight)
    by_path = find_model(str(run / "checkpoints" / "checkpoint-1"))
    assert by_path.name == "checkpoint-1" and by_path.layout.run == run


def test_the_same_seed_gives_the_same_text_and_another_one_another(run: Path) -> None:
    model = TextModel.open(str(run), device="cpu", dtype="fp32")
    texts = [model.continue_text("abc", Generation(seed=seed)).text for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_the_prompt_comes_first_where_it_is_requested(run: Path) -> None:
    model = TextModel.open(str(run))
    alone = model.continue_text("é€", GREEDY).text
    assert model.continue_text("é€", Generation(greedy=True, max_new_tokens=12, return_full_text=True)).text == (
        "é€" + alone
    )


def test_left_alone_a_text_ends_where_the_positions_do(run: Path) -> None:
    model = TextModel.open(str(run))
    prompt = "x" * 40
    said = model.continue_text(prompt, Generation(greedy=True))
    assert said.prompt_tokens + said.new_tokens - 1 == CONFIG.n_positions or said.is_ended
    with pytest.raises(SequenceTooLong):
        model.continue_text(prompt, Generation(max_new_tokens=10))
    with pytest.raises(SequenceTooLong):
        model.continue_text("x" * 49)


def test_words_of_a_control_token_and_odd_letters_are_text(tmp_path: Path) -> None:
    save_run(tmp_path / "run", tokenizer=str(train_bpe(tmp_path / "bpe")))
    source = TextFinder.find(str(tmp_path / "run"))
    ids = source.vocabulary.encode("a <|endoftext|> b")
    assert source.vocabulary.identity.eod_id not in ids
    assert source.vocabulary.decode_after([], ids) == "a <|endoftext|> b"
    assert source.vocabulary.encode("\ud83d") == source.vocabulary.encode("?")


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_narrow_dtype_computes_and_is_what_the_weights_are_in(run: Path, dtype: str) -> None:
    model = TextModel.open(str(run), dtype=dtype)
    assert model.loaded.model.embedding.weight.dtype == chosen_dtype(dtype, torch.device("cpu"))
    assert model.continue_text("abc", GREEDY).new_tokens > 0


def test_every_bad_option_is_named_at_once() -> None:
    with pytest.raises(GenerationInvalid) as caught:
        Generation(temperature=0, top_k=-1, top_p=2, repetition_penalty=float("nan"), max_new_tokens=0, seed=-1)
    assert len(caught.value.problems) == 6


def test_a_prompt_without_a_token_is_refused_before_weights_are_read(run: Path) -> None:
    with pytest.raises(GenerationInvalid, match="the prompt has no token"):
        TextFinder.find(str(run)).encode("", Generation())


def test_a_run_without_a_checkpoint_a_step_or_a_config_is_refused_by_what_it_lacks(tmp_path: Path) -> None:
    save_run(tmp_path / "run")
    (tmp_path / "empty" / "checkpoints").mkdir(parents=True)
    with pytest.raises(NoUsableCheckpoint):
        find_model(str(tmp_path / "empty"))
    with pytest.raises(PathMissing):
        find_model(str(tmp_path / "nothing"))
    with pytest.raises(CheckpointUnknown):
        find_model(f"{tmp_path / 'run'}@77")
    (tmp_path / "run" / "config.json").unlink()
    with pytest.raises(PathMissing, match="config of a run of the trainer"):
        find_model(str(tmp_path / "run"))


def test_a_newest_checkpoint_that_is_not_whole_is_skipped_and_named_and_never_if_it_was_requested(
    tmp_path: Path,
) -> None:
    save_run(tmp_path / "run", steps=2)
    newest = find_model(str(tmp_path / "run"))
    next((newest.path / "state").glob("*.distcp")).unlink()
    found = find_model(str(tmp_path / "run"))
    assert found.name != newest.name
    assert [over.name for over in found.skipped] == [newest.name]
    with pytest.raises(DamagedCheckpoint):
        find_model(str(newest.path))


@pytest.mark.promise("G5")
def test_a_byte_that_is_not_what_was_written_is_found_when_it_is_read(tmp_path: Path) -> None:
    save_run(tmp_path / "run")
    found = find_model(str(tmp_path / "run"))
    damage(found.path)
    with pytest.raises(DamagedCheckpoint, check=lambda each: len(each.findings) == 1):
        TextModel.open(str(found.path))


def test_where_none_is_named_the_next_older_one_is_taken_in_place_of_one_that_is_damaged(tmp_path: Path) -> None:
    save_run(tmp_path / "run")
    newest = find_model(str(tmp_path / "run"))
    damage(newest.path)
    opened = TextModel.open(str(tmp_path / "run"))
    [over] = opened.source.found.skipped
    assert over.name == newest.name and "state/__0_0.distcp" in over.reason
    assert (opened.loaded.name, opened.loaded.step) == ("checkpoint-1", 1)
    said = opened.continue_text("def ", Generation(greedy=True))
    assert said == TextModel.open(f"{tmp_path / 'run'}@1").continue_text("def ", Generation(greedy=True))
    assert newest.path.exists(), "only the job that holds the run moves it aside"
    damage(opened.loaded.found.path)
    with pytest.raises(NoUsableCheckpoint) as caught:
        TextModel.open(str(tmp_path / "run"))
    assert [name for name, _ in caught.value.skipped] == [newest.name, "checkpoint-1"]


def test_a_checkpoint_with_a_flipped_index_is_skipped_unless_it_is_named(tmp_path: Path) -> None:
    save_run(tmp_path / "run")
    newest = find_model(str(tmp_path / "run"))
    index = newest.path / "state" / "index.json"
    data = bytearray(index.read_bytes())
    data[len(data) // 2] ^= 1
    index.chmod(0o644)
    index.write_bytes(bytes(data))
    opened = TextModel.open(str(tmp_path / "run"))
    assert opened.loaded.name == "checkpoint-1"
    [over] = opened.source.found.skipped
    assert over.name == newest.name and over.reason.startswith("state/index.json: ")
    with pytest.raises(DamagedCheckpoint):
        TextModel.open(str(newest.path))


def test_the_average_of_the_weights_is_taken_where_it_is_requested_and_refused_where_there_is_none(
    tmp_path: Path,
) -> None:
    average = save_averaged(tmp_path / "averaged")
    opened = TextModel.open(str(tmp_path / "averaged"), ema=True)
    held = opened.loaded.model.state_dict()
    assert held.keys() == dict(average).keys() and all(torch.equal(held[name], average[name]) for name in held)
    own = TextModel.open(str(tmp_path / "averaged")).loaded.model.state_dict()
    assert not torch.equal(own["norm.weight"], held["norm.weight"])
    save_run(tmp_path / "run")
    with pytest.raises(NoAverage):
        TextModel.open(str(tmp_path / "run"), ema=True)


def test_another_tokenizer_is_refused_by_contents_and_the_same_one_taken_under_any_name(tmp_path: Path) -> None:
    own = train_bpe(tmp_path / "bpe")
    save_run(tmp_path / "run", tokenizer=str(own))
    other = train_bpe(tmp_path / "other", text="something else entirely, something else again")
    with pytest.raises(WrongTokenizer, match="of other contents"):
        TextFinder.find(str(tmp_path / "run"), str(other))
    with pytest.raises(WrongTokenizer):
        TextFinder.find(str(tmp_path / "run"), "bytes")
    laid_out_anew = tmp_path / "elsewhere.json"
    laid_out_anew.write_text(json.dumps(json.loads(own.read_text()), indent=3))
    assert TextFinder.find(str(tmp_path / "run"), str(laid_out_anew)).vocabulary.encode("def ")


def test_without_a_kept_tokenizer_one_with_too_many_ids_is_refused(tmp_path: Path) -> None:
    save_run(tmp_path / "run", keeps_tokenizer=False, rows=256)
    with pytest.raises(WrongTokenizer, match="257"):
        TextFinder.find(str(tmp_path / "run"), "bytes")


def test_a_tokenizer_that_is_nowhere_or_a_record_that_is_none_is_reported(tmp_path: Path) -> None:
    save_run(tmp_path / "run")
    with pytest.raises(TokenizerUnknown):
        TextFinder.find(str(tmp_path / "run"), str(tmp_path / "no.json"))
    (tmp_path / "run" / "tokenizer" / "identity.json").write_text("[]")
    with pytest.raises(TokenizerUnknown) as caught:
        TextFinder.find(str(tmp_path / "run"))
    assert "the record is damaged" in caught.value.reason


@pytest.mark.parametrize("asked", ["cuda:97", "tpu", "xla", ""])
def test_a_device_that_is_not_here_is_refused_with_those_that_are(asked: str) -> None:
    with pytest.raises(DeviceMissing) as caught:
        chosen_device(asked)
    assert "cpu" in caught.value.available


def test_a_device_without_room_is_an_error_with_its_name(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("no room")

    model = TextModel.open(str(run))
    monkeypatch.setattr("unbroken.gpt.text.generate", full)
    with pytest.raises(DeviceFull, check=lambda each: (each.device, each.doing) == ("cpu", "the text")):
        model.continue_text("abc")
