"""Many prompts from one file: validated, grouped by model, answered in order.

Every line is a JSON object with ``prompt`` and optionally ``id``, ``model`` and ``generation``. All problems are
reported before any model is loaded, each with its line. Each model is loaded once.
"""

import difflib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Final

import torch

from unbroken.errors import BatchInvalid, GenerationInvalid, SequenceTooLong, UnbrokenError
from unbroken.gpt.device import DTYPES, chosen_dtype
from unbroken.gpt.sampling import Generation
from unbroken.gpt.text import Continued, TextFinder, TextModel

RECORD_KEYS: Final = ("prompt", "id", "model", "generation")
MODEL_KEYS: Final = ("checkpoint", "output_dir", "dtype", "tokenizer")
_AVERAGED: Final = "ema"
_TYPES: Final[Mapping[str, tuple[type, ...]]] = {
    "max_new_tokens": (int,),
    "temperature": (int, float),
    "top_k": (int,),
    "top_p": (int, float),
    "greedy": (bool,),
    "repetition_penalty": (int, float),
    "seed": (int,),
    "return_full_text": (bool,),
}
_WORDS: Final = {int: "a whole number", float: "a number", bool: "true or false"}


@dataclass(frozen=True)
class ModelChoice:
    """The model of a record: a reference, the name of a dtype or None for the device's own, a tokenizer or None.

    ``is_averaged``: use the average of its weights.
    """

    reference: str | None = None
    dtype: str | None = None
    tokenizer: str | None = None
    is_averaged: bool = False


@dataclass(frozen=True)
class Prompt:
    """One record: its line, its id if given, its model and generation options."""

    line: int
    prompt: str
    id: str | int | None
    model: ModelChoice
    generation: Generation


@dataclass(frozen=True)
class Answer:
    """The result of a record: text, or an error."""

    prompt: Prompt
    source: TextFinder
    continued: Continued | None
    error: UnbrokenError | None = None

    def json_fields(self) -> dict[str, Any]:
        """The record of the output."""
        said, refused = self.continued, self.error
        return {
            **({} if self.prompt.id is None else {"id": self.prompt.id}),
            "prompt": self.prompt.prompt,
            "text": None if said is None else said.text,
            "prompt_tokens": None if said is None else said.prompt_tokens,
            "new_tokens": None if said is None else said.new_tokens,
            "is_ended": None if said is None else said.is_ended,
            "checkpoint": str(self.source.found.path),
            "step": self.source.found.manifest.step,
            "error": None if refused is None else {"kind": refused.kind, "message": refused.headline()},
        }


@dataclass(frozen=True)
class PromptBatch:
    """Valid records, and their models, found but not loaded."""

    prompts: tuple[Prompt, ...]
    sources: Mapping[ModelChoice, TextFinder]

    def groups(self, device: torch.device) -> dict[tuple[Path, torch.dtype, str, bool], list[Prompt]]:
        """The records by what must be loaded: checkpoint, dtype, tokenizer, and whether averaged."""
        found: dict[tuple[Path, torch.dtype, str, bool], list[Prompt]] = {}
        for prompt in self.prompts:
            source = self.sources[prompt.model]
            dtype = chosen_dtype(prompt.model.dtype, device)
            path = source.found.path.resolve()
            key = (path, dtype, source.vocabulary.identity.digest, source.found.is_averaged)
            found.setdefault(key, []).append(prompt)
        return found

    def answers(self, device: torch.device, progress: Callable[[int], None] | None = None) -> list[Answer]:
        """Continue every prompt; an error of one becomes its answer and does not stop the others."""
        by_line: dict[int, Answer] = {}
        for (_, dtype, _, _), prompts in self.groups(device).items():
            source = self.sources[prompts[0].model]
            for answer in _answered(source, prompts, device, dtype):
                by_line[answer.prompt.line] = answer
                if progress is not None:
                    progress(1)
        return [by_line[prompt.line] for prompt in self.prompts]


def _answered(
    source: TextFinder, prompts: Iterable[Prompt], device: torch.device, dtype: torch.dtype
) -> Iterator[Answer]:
    model: TextModel | UnbrokenError
    try:
        model = source.load(device, dtype)
    except UnbrokenError as refused:
        # Weights that cannot be read are an error of all records with this model, and of no other.
        model = refused
    for prompt in prompts:
        if isinstance(model, UnbrokenError):
            yield Answer(prompt, source, None, model)
            continue
        try:
            yield Answer(prompt, model.source, model.continue_text(prompt.prompt, prompt.generation))
        except UnbrokenError as refused:
            yield Answer(prompt, model.source, None, refused)


def read_batch(path: Path, text: str, model: ModelChoice, generation: Generation) -> PromptBatch:
    """The records of a file, with defaults where they say nothing; their models and tokenizers are looked for.

    Raises:
        BatchInvalid: records are invalid; it lists all problems with their lines.
        UnbrokenError: the default model cannot be used, and a record needs it.
    """
    reading = _Reading(model, generation)
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            reading.take(number, line)
    if not reading.prompts and not reading.problems:
        reading.complain(1, "the file holds no record")
    sources = reading.find_models()
    reading.look_at_prompts(sources)
    if reading.problems:
        in_order = sorted(reading.problems, key=lambda problem: problem[0])
        raise BatchInvalid(path=path, problems=tuple(f"{path}:{line}  {said}" for line, said in in_order))
    return PromptBatch(tuple(reading.prompts), sources)


class _Reading:
    """Records and problems as they are found."""

    def __init__(self, model: ModelChoice, generation: Generation) -> None:
        self.model, self.generation = model, generation
        self.prompts: list[Prompt] = []
        self.problems: list[tuple[int, str]] = []

    def complain(self, line: int, complaint: str) -> None:
        """Add a problem."""
        self.problems.append((line, complaint))

    def take(self, line: int, text: str) -> None:
        """Read one line."""
        try:
            record = json.loads(text, parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as wrong:
            self.complain(line, f"not JSON: {wrong}")
            return
        if not isinstance(record, dict):
            self.complain(line, "not a JSON object")
            return
        before = len(self.problems)
        self._look_at_names(line, "", record, RECORD_KEYS)
        prompt = record.get("prompt")
        if not isinstance(prompt, str) or not prompt:
            said = "it is missing" if prompt is None else "it must be a text that is not empty"
            self.complain(line, f"prompt: {said}")
        own = record.get("id")
        if own is not None and (isinstance(own, bool) or not isinstance(own, str | int)):
            self.complain(line, "id: it must be a text or a whole number")
        model = self._model(line, record.get("model"))
        generation = self._generation(line, record.get("generation"))
        if len(self.problems) == before:
            assert isinstance(prompt, str)
            self.prompts.append(Prompt(line, prompt, own, model, generation))

    def _look_at_names(self, line: int, prefix: str, given: Mapping[str, Any], known: Iterable[str]) -> None:
        names = tuple(known)
        for name in given:
            if name not in names:
                close = difflib.get_close_matches(name, names, n=1)
                meant = f"; did you mean {prefix}{close[0]}?" if close else f"; known are {', '.join(names)}"
                self.complain(line, f"{prefix}{name}: unknown key{meant}")

    def _model(self, line: int, given: object) -> ModelChoice:
        if given is None:
            given = {}
        if not isinstance(given, dict):
            self.complain(line, "model: it must be an object")
            return self.model
        self._look_at_names(line, "model.", given, (*MODEL_KEYS, _AVERAGED))
        averaged = given.get(_AVERAGED, self.model.is_averaged)
        if not isinstance(averaged, bool):
            self.complain(line, f"model.{_AVERAGED}: it must be true or false")
            return self.model
        for name in MODEL_KEYS:
            if name in given and (not isinstance(given[name], str) or not given[name]):
                self.complain(line, f"model.{name}: it must be a text that is not empty")
                return self.model
        if "checkpoint" in given and "output_dir" in given:
            self.complain(line, "model: checkpoint and output_dir exclude each other")
        dtype = given.get("dtype", self.model.dtype)
        if dtype is not None and dtype not in DTYPES:
            self.complain(line, f"model.dtype: it must be {' or '.join(DTYPES)}, is {dtype}")
        reference = given.get("checkpoint") or given.get("output_dir")
        if reference is None and self.model.reference is None:
            self.complain(line, "model: not given, neither in the record nor on the command line")
        # The default's tokenizer is that of the default's model.
        tokenizer = self.model.tokenizer if reference is None else None
        return ModelChoice(reference or self.model.reference, dtype, given.get("tokenizer", tokenizer), averaged)

    def _generation(self, line: int, given: object) -> Generation:
        if given is None:
            given = {}
        if not isinstance(given, dict):
            self.complain(line, "generation: it must be an object")
            return self.generation
        self._look_at_names(line, "generation.", given, _TYPES)
        values: dict[str, Any] = {}
        for name in (each.name for each in fields(Generation)):
            value = given.get(name)
            if value is None:
                continue
            if not isinstance(value, _TYPES[name]) or (isinstance(value, bool) and bool not in _TYPES[name]):
                self.complain(line, f"generation.{name}: it must be {_WORDS[_TYPES[name][-1]]}")
                continue
            values[name] = value
        try:
            return replace(self.generation, **values)
        except GenerationInvalid as wrong:
            for problem in wrong.problems:
                self.complain(line, f"generation.{problem}")
            return self.generation

    def find_models(self) -> dict[ModelChoice, TextFinder]:
        """Find the models of all records."""
        found: dict[ModelChoice, TextFinder] = {}
        bad: dict[ModelChoice, UnbrokenError] = {}
        for prompt in self.prompts:
            choice = prompt.model
            assert choice.reference is not None
            if choice not in found and choice not in bad:
                try:
                    found[choice] = TextFinder.find(choice.reference, choice.tokenizer, is_averaged=choice.is_averaged)
                except UnbrokenError as refused:
                    if replace(choice, dtype=self.model.dtype) == self.model:
                        raise
                    bad[choice] = refused
            if choice in bad:
                error = bad[choice]
                self.complain(prompt.line, f"model: {choice.reference}: {error.headline()} ({error.kind})")
        return found

    def look_at_prompts(self, sources: Mapping[ModelChoice, TextFinder]) -> None:
        """Check that each prompt can be continued by its model."""
        for prompt in self.prompts:
            if prompt.model not in sources:
                continue
            try:
                sources[prompt.model].encode(prompt.prompt, prompt.generation)
            except (GenerationInvalid, SequenceTooLong) as refused:
                self.complain(prompt.line, f"prompt: {refused.headline()}")


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")
