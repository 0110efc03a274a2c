"""Many prompts: every problem at once with its line, one load a model, answers in the order of the prompts."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.gpt.runs import damage, save_averaged, save_run
from unbroken.errors import BatchInvalid, LogitsNotFinite, NoUsableCheckpoint
from unbroken.gpt.batch_prompts import ModelChoice, PromptBatch, read_batch
from unbroken.gpt.checkpoint import FoundModel, find_model
from unbroken.gpt.sampling import Generation
from unbroken.gpt.text import TextModel

FILE = Path("prompts.jsonl")
CPU = torch.device("cpu")
SHORT = Generation(greedy=True, max_new_tokens=4)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("batch")
    save_run(folder / "a", steps=1)
    save_run(folder / "b", steps=1, seed=8)
    return folder


def read(records: Iterable[Any], run: Path | None) -> PromptBatch:
    text = "\n".join(each if isinstance(each, str) else json.dumps(each) for each in records)
    return read_batch(FILE, text, ModelChoice(None if run is None else str(run)), SHORT)


def problems(records: Iterable[Any], run: Path | None) -> list[str]:
    with pytest.raises(BatchInvalid) as caught:
        read(records, run)
    return [each.removeprefix(f"{FILE}:") for each in caught.value.problems]


@pytest.mark.promise("G22")
def test_answers_come_in_the_order_of_the_prompts_and_each_model_is_loaded_once(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads: list[str] = []
    load = FoundModel.load

    def counted(self: FoundModel, *arguments: Any, **options: Any) -> Any:  # noqa: ANN401 - as Found.load has them
        loads.append(str(self.layout.run))
        return load(self, *arguments, **options)

    monkeypatch.setattr(FoundModel, "load", counted)
    other = {"model": {"output_dir": str(runs / "b")}}
    same = {"model": {"checkpoint": str(find_model(str(runs / "a")).path)}}
    batch = read(
        [{"prompt": "x", "id": 1}, {"prompt": "y", **other}, "", {"prompt": "z"}, {"prompt": "x", **same}], runs / "a"
    )
    answers = batch.answers(CPU)
    assert loads == [str(runs / "a"), str(runs / "b")]
    assert [answer.prompt.prompt for answer in answers] == ["x", "y", "z", "x"]
    assert [answer.prompt.line for answer in answers] == [1, 2, 4, 5]
    facts = [answer.json_fields() for answer in answers]
    assert facts[0]["id"] == 1 and "id" not in facts[1]
    assert facts[0]["text"] == facts[3]["text"] == TextModel.open(str(runs / "a")).continue_text("x", SHORT).text
    assert facts[1]["text"] == TextModel.open(str(runs / "b")).continue_text("y", SHORT).text
    assert all(each["error"] is None and each["step"] == 1 for each in facts)


def test_a_record_has_its_own_options_and_the_defaults_where_it_says_nothing(runs: Path) -> None:
    own = {"temperature": 2, "top_k": 0, "seed": 5, "greedy": False, "return_full_text": True}
    (prompt,) = read([{"prompt": "x", "generation": own, "model": {"dtype": "bf16"}}], runs / "a").prompts
    assert prompt.generation == Generation(max_new_tokens=4, **own)  # type: ignore[arg-type]
    assert prompt.model.dtype == "bf16"


def test_one_model_in_two_dtypes_is_two_models(runs: Path) -> None:
    batch = read([{"prompt": "x"}, {"prompt": "x", "model": {"dtype": "bf16"}}, {"prompt": "y"}], runs / "a")
    assert [len(prompts) for prompts in batch.groups(CPU).values()] == [2, 1]


def test_every_problem_of_every_line_is_named_at_once(runs: Path) -> None:
    found = problems(
        [
            "no json",
            "[1]",
            {"text": "x"},
            {"prompt": ""},
            {"prompt": 3, "id": True},
            {"prompt": "x", "generation": {"gredy": True, "top_k": 1.5, "seed": True, "temperature": "hot"}},
            {"prompt": "x", "generation": {"temperature": 0, "top_p": 3}},
            {"prompt": "x", "generation": []},
            {"prompt": "x", "model": {"checkpoints": "a", "dtype": "fp8"}},
            {"prompt": "x", "model": {"checkpoint": "a", "output_dir": "b"}},
            {"prompt": "x", "model": {"output_dir": "no-such-run"}},
            {"prompt": "x" * 60},
            '{"prompt": "x", "generation": {"temperature": NaN}}',
        ],
        runs / "a",
    )
    assert [int(each.split(" ")[0]) for each in found] == [
        1,
        2,
        3,
        3,
        4,
        5,
        5,
        6,
        6,
        6,
        6,
        7,
        7,
        8,
        9,
        9,
        10,
        11,
        12,
        13,
    ]
    said = "\n".join(found)
    for words in (
        "1  not JSON",
        "3  text: unknown key",
        "3  prompt: it is missing",
        "6  generation.gredy: unknown key; did you mean generation.greedy?",
        "6  generation.seed: it must be a whole number",
        "7  generation.temperature must be above 0",
        "9  model.checkpoints: unknown key; did you mean model.checkpoint?",
        "9  model.dtype: it must be fp32 or fp16 or bf16, is fp8",
        "11  model: no-such-run: no run, store or checkpoint at this path (path-missing)",
        "12  prompt: a sequence of 63 tokens is longer than the model's 48 positions",
        "13  not JSON: NaN is not JSON",
    ):
        assert words in said, words


def test_a_file_without_a_record_and_a_record_without_a_model_are_problems(runs: Path) -> None:
    assert problems(["", " "], runs / "a") == ["1  the file holds no record"]
    assert problems([{"prompt": "x"}], None) == ["1  model: not given, neither in the record nor on the command line"]


def test_a_default_that_cannot_be_used_is_its_own_error(tmp_path: Path) -> None:
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    with pytest.raises(NoUsableCheckpoint):
        read([{"prompt": "x"}], tmp_path / "run")


@pytest.mark.promise("G22")
def test_what_goes_wrong_with_one_record_is_its_own_error_and_the_others_are_answered(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    continue_text = TextModel.continue_text

    def failing(self: TextModel, prompt: str, generation: Generation | None = None) -> Any:  # noqa: ANN401 - a Continued
        if prompt == "bad":
            raise LogitsNotFinite(tokens=3)
        return continue_text(self, prompt, generation)

    monkeypatch.setattr(TextModel, "continue_text", failing)
    first, bad, last = read([{"prompt": "x"}, {"prompt": "bad"}, {"prompt": "y"}], runs / "a").answers(CPU)
    assert first.error is None and last.error is None
    assert bad.json_fields()["text"] is None
    assert bad.json_fields()["error"]["kind"] == "logits-not-finite"


def test_weights_that_are_damaged_are_the_error_of_those_who_requested_them(tmp_path: Path, runs: Path) -> None:
    save_run(tmp_path / "run", steps=1)
    records = [{"prompt": "x"}, {"prompt": "x", "model": {"output_dir": str(tmp_path / "run")}}]
    batch = read(records, runs / "a")
    damage(find_model(str(tmp_path / "run")).path)
    sound, bad = batch.answers(CPU)
    assert sound.error is None
    assert bad.error is not None and bad.error.kind == "no-usable-checkpoint" and bad.error.exit_code == 5


def test_a_record_may_ask_for_the_average_of_the_weights(tmp_path: Path, runs: Path) -> None:
    save_averaged(tmp_path / "averaged")
    own, averaged = ({"output_dir": str(tmp_path / "averaged"), "ema": ema} for ema in (False, True))
    batch = read([{"prompt": "x", "model": own}, {"prompt": "x", "model": averaged}], runs / "a")
    assert len(batch.groups(CPU)) == 2
    assert [answer.source.found.is_averaged for answer in batch.answers(CPU)] == [False, True]
    with pytest.raises(BatchInvalid) as caught:
        read([{"prompt": "x", "model": {"ema": 1}}, {"prompt": "x", "model": {"ema": True}}], runs / "a")
    first, second = caught.value.problems
    assert "model.ema: it must be true or false" in first and "(no-average)" in second
