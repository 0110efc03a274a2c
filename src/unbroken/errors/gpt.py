"""Errors of the model: what it cannot take, where it cannot run, what another library's model cannot express."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from unbroken.errors.tree import CheckpointError, Help, UsageError
from unbroken.quoting.amounts import count, plural

_MOST_SHOWN: Final = 100


@dataclass(eq=False, kw_only=True)
class SequenceTooLong(UsageError):
    """More tokens than the model has positions."""

    kind = "sequence-too-long"
    tokens: int
    positions: int

    def headline(self) -> str:
        return f"a sequence of {count(self.tokens)} tokens is longer than the model's {count(self.positions)} positions"

    def so(self) -> str | None:
        return "the model was never trained on such places; nothing was computed"

    def help(self) -> tuple[Help, ...]:
        return (Help("unbroken explain model.n_positions", "the field that sets how long a sequence may be"),)


@dataclass(eq=False, kw_only=True)
class GenerationInvalid(UsageError):
    """A prompt or a sampling option that cannot be used."""

    kind = "generation-invalid"
    problems: tuple[str, ...]

    def headline(self) -> str:
        if len(self.problems) == 1:
            return self.problems[0]
        return f"{count(len(self.problems))} things about the text to generate are wrong"

    def so(self) -> str | None:
        return "nothing was generated"

    def details(self) -> Iterator[str]:
        if len(self.problems) > 1:
            yield from self.problems

    def help(self) -> tuple[Help, ...]:
        return (Help(f"unbroken explain {self.kind}", "what each option may be"),)


@dataclass(eq=False, kw_only=True)
class LogitsNotFinite(CheckpointError):
    """A model whose logits are no numbers."""

    kind = "logits-not-finite"
    tokens: int

    def headline(self) -> str:
        return f"after {count(self.tokens)} tokens the model's logits are not finite"

    def so(self) -> str | None:
        return "its weights have diverged, or the dtype is too narrow for them; no token can be chosen"

    def help(self) -> tuple[Help, ...]:
        return (Help(f"unbroken explain {self.kind}", "how to tell which, and what to try"),)


@dataclass(eq=False, kw_only=True)
class NotExpressible(UsageError):
    """A model with options that the format it is exported to does not have."""

    kind = "not-expressible"
    target: str
    options: tuple[str, ...]

    def headline(self) -> str:
        return f"{self.target} cannot express {', '.join(self.options)}"

    def so(self) -> str | None:
        return "nothing was written; the exported model would compute something else"

    def help(self) -> tuple[Help, ...]:
        return (Help(f"unbroken explain {self.kind}", "which options can be exported, and the formats that take all"),)


@dataclass(eq=False, kw_only=True)
class WrongTokenizer(UsageError):
    """A tokenizer whose ids do not mean what the model was trained on."""

    kind = "wrong-tokenizer"
    tokenizer: str
    run: Path
    complaint: str

    def headline(self) -> str:
        return f"the tokenizer {self.tokenizer} does not fit the model: {self.complaint}"

    def at(self) -> str | None:
        return str(self.run)

    def so(self) -> str | None:
        return "the same text would be other ids, and the same ids other text; nothing was read or written with it"

    def help(self) -> tuple[Help, ...]:
        return (Help(f"unbroken explain {self.kind}", "which tokenizer a run takes by itself"),)


@dataclass(eq=False, kw_only=True)
class DeviceMissing(UsageError):
    """A device that this machine does not have, or that this build of torch cannot use."""

    kind = "device-missing"
    asked: str
    there: tuple[str, ...]

    def headline(self) -> str:
        return f"there is no device '{self.asked}' here"

    def so(self) -> str | None:
        return f"torch finds {', '.join(self.there)}"

    def help(self) -> tuple[Help, ...]:
        return (Help(f"unbroken explain {self.kind}", "how a GPU can be there and not be found"),)


@dataclass(eq=False, kw_only=True)
class CompilerMissing(UsageError):
    """A machine without the compiler that training needs: on a CPU one for C++, on a GPU one for C."""

    kind = "compiler-missing"
    compiler: str
    device: str = "cpu"

    def headline(self) -> str:
        if self.device == "cuda":
            return f"training on a GPU needs a C compiler, and there is no '{self.compiler}' here"
        return f"training.compile is true, and there is no C++ compiler '{self.compiler}' here"

    def so(self) -> str | None:
        if self.device == "cuda":
            return "Triton builds what starts its kernels with it; nothing was started"
        return "torch.compile builds code for a CPU with it; training.compile=false trains without; nothing was started"

    def help(self) -> tuple[Help, ...]:
        return (Help(f"unbroken explain {self.kind}", "which compiler is looked for, and how to go without"),)


@dataclass(eq=False, kw_only=True)
class NoAverage(UsageError):
    """A checkpoint that holds no average of its weights, asked for it."""

    kind = "no-average"
    checkpoint: Path

    def headline(self) -> str:
        return "the checkpoint holds no average of the weights"

    def at(self) -> str | None:
        return str(self.checkpoint)

    def so(self) -> str | None:
        return "it was saved without training.ema_decay; without --ema its own weights are taken"

    def help(self) -> tuple[Help, ...]:
        return (Help("unbroken explain training.ema_decay", "the field that keeps an average"),)


@dataclass(eq=False, kw_only=True)
class DeviceFull(UsageError):
    """A device without room for a model, for a text, or for a training."""

    kind = "device-full"
    device: str
    doing: str
    is_training: bool = False

    def headline(self) -> str:
        return f"the memory of {self.device} is not enough for {self.doing}"

    def so(self) -> str | None:
        if self.is_training:
            return "checkpoints that were saved are whole; smaller lanes, recomputed blocks or shards need less"
        return "a narrower dtype halves what weights and cache need; a CPU has another memory"

    def help(self) -> tuple[Help, ...]:
        counted = (Help("unbroken validate CONFIG", "count the memory of a rank"),) if self.is_training else ()
        return (*counted, Help(f"unbroken explain {self.kind}", "what needs how much"))


@dataclass(eq=False, kw_only=True)
class BatchInvalid(UsageError):
    """A file of prompts with records that cannot be used: every problem at once, with its line."""

    kind = "batch-invalid"
    path: Path
    problems: tuple[str, ...]

    def headline(self) -> str:
        return f"the file of prompts has {plural(len(self.problems), 'problem')}"

    def at(self) -> str | None:
        return str(self.path)

    def so(self) -> str | None:
        return "no model was loaded and nothing was written"

    def details(self) -> Iterator[str]:
        yield from self.problems[:_MOST_SHOWN]
        if len(self.problems) > _MOST_SHOWN:
            yield f"and {count(len(self.problems) - _MOST_SHOWN)} more"

    def help(self) -> tuple[Help, ...]:
        return (Help(f"unbroken explain {self.kind}", "what a record may hold"),)
