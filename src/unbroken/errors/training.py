"""Errors of the model and its arithmetic: devices, memory, lanes, gradients, generation and export."""

from collections.abc import Iterator
from pathlib import Path

from unbroken.errors.tree import CheckpointError, Each, ExactnessError, Help, TrainingError, UsageError
from unbroken.quoting.amounts import plural

# ---- devices ----


class DeviceMissing(UsageError):
    """A device that this machine does not have, or that this build of torch cannot use."""

    kind = "device-missing"
    device: str
    available: tuple[str, ...]
    HEADLINE = "device '{device}' not found"
    SO = "torch finds {available:list}"
    HELP = (Help("unbroken explain {kind}", "why torch may not find a GPU"),)


class DeviceFull(UsageError):
    """A device without enough memory for a model, for a text, or for training."""

    kind = "device-full"
    device: str
    doing: str
    is_training: bool = False

    def headline(self) -> str:
        full = f"{'CUDA ' if self.device.startswith('cuda') else ''}out of memory on {self.device}"
        return full if self.is_training else f"{full}, for {self.doing}"

    def so(self) -> str | None:
        if self.is_training:
            return "saved checkpoints are intact; use smaller lanes, gradient checkpointing or sharding"
        return "a narrower dtype halves the memory of weights and cache; --device cpu uses host memory"

    def help(self) -> tuple[Help, ...]:
        counted = (Help("unbroken validate CONFIG", "estimate the memory of a rank"),) if self.is_training else ()
        return (*counted, self.explained("what needs how much memory"))


class CompilerMissing(UsageError):
    """A machine without the compiler that training needs: on a CPU one for C++, on a GPU one for C."""

    kind = "compiler-missing"
    compiler: str
    device: str = "cpu"
    HELP = (Help("unbroken explain {kind}", "which compiler is used, and how to train without one"),)

    def headline(self) -> str:
        if self.device == "cuda":
            return f"training on a GPU needs a C compiler, and '{self.compiler}' is not installed"
        return f"training.compile is true, and the C++ compiler '{self.compiler}' is not installed"

    def so(self) -> str | None:
        if self.device == "cuda":
            return "Triton needs it to launch kernels; nothing was started"
        return "torch.compile needs it on a CPU; training.compile=false trains without it; nothing was started"


class TorchTooOld(UsageError):
    """A part of this package that needs a newer torch than the one that is installed."""

    kind = "torch-too-old"
    feature: str
    required: str
    installed: str
    reason: str
    HEADLINE = "{feature} needs torch {required} or newer, and this is torch {installed}: {reason}"
    SO = "nothing was changed; everything else works with this torch"
    HELP = (Help("unbroken explain {kind}", "what works with which version of torch"),)


# ---- gradients and lanes ----


class GradientNotFinite(TrainingError):
    """In fp16, a gradient that overflows at the lowest loss scale, though the loss is finite."""

    kind = "gradient-not-finite"
    step: int
    loss: float
    scale: float
    overflowed: int
    HEADLINE = "the gradient is not finite at step {step:,}, at the lowest loss scale {scale:g}"
    SO = "no loss scale helps; this step is not saved, the last checkpoint is intact"
    HELP = (Help("unbroken explain {kind}", "what to check, and how to continue"),)

    def details(self) -> Iterator[str]:
        yield f"the loss is {self.loss:.4g}; {plural(self.overflowed, 'earlier step')} of the run overflowed"


class TooManyRanks(UsageError):
    """More ranks than lanes: some would have nothing to compute."""

    kind = "too-many-ranks"
    ranks: int
    lanes: int
    HEADLINE = "{ranks:n rank} but only {lanes:n lane} per step"
    SO = "start at most {lanes:n rank}; changing the number of lanes changes the training"
    HELP = (Help("unbroken explain {kind}", "how lanes are assigned to ranks"),)


class LaneBroken(UsageError):
    """A lane that was not computed as one micro-batch with one backward."""

    kind = "lane-broken"
    complaint: str
    HEADLINE = "{complaint}"
    SO = "the step is not summed: gradients of some lanes are missing"
    HELP = (Help("unbroken explain {kind}", "what the body of a lane looks like"),)


class CannotFold(UsageError):
    """A model, a parameter or an optimizer whose gradients cannot be summed exactly on any world size."""

    kind = "cannot-fold"
    name: str
    reason: str
    HEADLINE = "'{name}' does not support exact gradient sums: {reason}"
    SO = "nothing was changed; the bits would depend on the world size"
    HELP = (Help("unbroken explain {kind}", "what is supported, and what to do about the rest"),)


class ArithmeticDiffers(ExactnessError):
    """This process computes differently from the one that saved; the bits would differ from here on."""

    kind = "arithmetic-differs"
    differences: tuple[tuple[str, str, str], ...]
    SO = "a resume would not be exact"
    HELP = (Help("unbroken explain {kind}", "what each name means and how to accept it"),)

    def headline(self) -> str:
        names = ", ".join(name for name, _, _ in self.differences[:4])
        more = f" and {len(self.differences) - 4} more" if len(self.differences) > 4 else ""
        return f"this process computes differently from the one that saved: {names}{more}"

    def details(self) -> Iterator[str]:
        for name, saved, here in self.differences[:4]:
            yield f"{name}: {saved} in the checkpoint, {here} here"
        if len(self.differences) > 4:
            # By name at least: accepting them needs every name.
            yield f"and {len(self.differences) - 4} more: {', '.join(name for name, _, _ in self.differences[4:])}"


class NotExactHere(ExactnessError):
    """The self-test found other bits for the layout and precision that a training would use on this machine."""

    kind = "not-exact-here"
    layout: str
    dtype: str
    device: str
    torch: str
    because: tuple[str, ...]
    HEADLINE = "a {layout} model in {dtype} is not exact on this machine"
    AT = "torch {torch} on {device}"
    SO = "the self-test found bits that depend on the layout; nothing was trained"
    DETAILS = Each("because")
    HELP = (
        Help("unbroken doctor", "run the self-test again and show all combinations"),
        Help("unbroken explain {kind}", "what to do"),
    )


# ---- generation and export ----


class SequenceTooLong(UsageError):
    """More tokens than the model has positions."""

    kind = "sequence-too-long"
    tokens: int
    positions: int
    HEADLINE = "a sequence of {tokens:n token} is longer than the model's {positions:n position}"
    SO = "the model was never trained on such positions; nothing was computed"
    HELP = (Help("unbroken explain model.n_positions", "the field that sets the maximum sequence length"),)


class GenerationInvalid(UsageError):
    """A prompt or a sampling option that cannot be used."""

    kind = "generation-invalid"
    problems: tuple[str, ...]
    SO = "nothing was generated"
    HELP = (Help("unbroken explain {kind}", "which values each option takes"),)

    def headline(self) -> str:
        if len(self.problems) == 1:
            return self.problems[0]
        return f"{len(self.problems):,} problems in the generation options"

    def details(self) -> Iterator[str]:
        if len(self.problems) > 1:
            yield from self.problems


class BatchInvalid(UsageError):
    """A file of prompts with invalid records: every problem at once, with its line."""

    kind = "batch-invalid"
    path: Path
    problems: tuple[str, ...]
    HEADLINE = "the file of prompts has {problems:n problem}"
    SO = "no model was loaded and nothing was written"
    DETAILS = Each("problems", most=100)
    HELP = (Help("unbroken explain {kind}", "what a record may contain"),)


class LogitsNotFinite(CheckpointError):
    """A model whose logits are NaN or Inf."""

    kind = "logits-not-finite"
    tokens: int
    HEADLINE = "the model's logits are not finite after {tokens:n token}"
    SO = "the weights have diverged or the dtype is too narrow; no token can be sampled"
    HELP = (Help("unbroken explain {kind}", "how to tell which, and what to try"),)


class NoAverage(UsageError):
    """``--ema`` was given for a checkpoint that contains no EMA of the weights."""

    kind = "no-average"
    checkpoint: Path
    HEADLINE = "the checkpoint has no EMA of the weights"
    AT = "{checkpoint}"
    SO = "it was saved without training.ema_decay; omit --ema to use its own weights"
    HELP = (Help("unbroken explain training.ema_decay", "the field that turns the EMA on"),)


class WrongTokenizer(UsageError):
    """A tokenizer other than the one the model was trained with."""

    kind = "wrong-tokenizer"
    tokenizer: str
    run: Path
    complaint: str
    HEADLINE = "the tokenizer {tokenizer} does not match the model: {complaint}"
    AT = "{run}"
    SO = "the same ids would mean other text; nothing was read or written with it"
    HELP = (Help("unbroken explain {kind}", "which tokenizer a run uses by default"),)


class NotExpressible(UsageError):
    """A model with options that the format it is exported to does not have."""

    kind = "not-expressible"
    target: str
    options: tuple[str, ...]
    HEADLINE = "{target} does not support {options:list}"
    SO = "nothing was written; the exported model would compute something else"
    HELP = (Help("unbroken explain {kind}", "which options can be exported, and the formats that support all"),)
