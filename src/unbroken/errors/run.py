"""Errors of a run's records: its deadline, its outcome, and the job that is to be stopped."""

from dataclasses import dataclass
from pathlib import Path

from unbroken.errors.tree import BusyError, ExactnessError, Help, UsageError, quoted
from unbroken.quoting import amounts


@dataclass(eq=False, kw_only=True)
class BadDeadline(UsageError):
    """A limit on a job's time that cannot be kept."""

    kind = "bad-deadline"
    source: str
    value: str
    complaint: str

    def headline(self) -> str:
        return f"the deadline in {self.source} cannot be kept: {self.complaint}"

    def at(self) -> str | None:
        return f"{self.source}={self.value}"

    def so(self) -> str | None:
        return "the job does not start: it would end without having saved"

    def help(self) -> tuple[Help, ...]:
        return (Help("unbroken explain bad-deadline", "where a deadline comes from and what each form means"),)


@dataclass(eq=False, kw_only=True)
class LeftMidStep(ExactnessError):
    """The loop was left where its state is neither that of the last step nor that of the next."""

    kind = "left-mid-step"
    run: Path
    step: int
    resumable_step: int | None

    def headline(self) -> str:
        return f"the loop was left in the middle of step {self.step:,}, so its state could not be saved"

    def at(self) -> str | None:
        return str(self.run)

    def so(self) -> str | None:
        saved = "no step is saved" if self.resumable_step is None else f"step {self.resumable_step:,} is saved"
        return f"{saved}; a resume computes the steps after it again"

    def help(self) -> tuple[Help, ...]:
        return (Help("unbroken explain left-mid-step", "how to end a loop early without losing a step"),)


@dataclass(eq=False, kw_only=True)
class LoopsDisagree(UsageError):
    """Some ranks left the loop while others were still in it."""

    kind = "loops-disagree"
    run: Path
    step: int

    def headline(self) -> str:
        return f"some ranks left the loop at step {self.step:,}, others did not"

    def at(self) -> str | None:
        return str(self.run)

    def so(self) -> str | None:
        return "the ranks have no common state to save; the last commit is intact"

    def help(self) -> tuple[Help, ...]:
        return (Help("unbroken explain loops-disagree", "how to end a loop on all ranks from a decision of one"),)


@dataclass(eq=False, kw_only=True)
class NoOutcome(UsageError):
    """A run in which no job has run yet."""

    kind = "no-outcome"
    path: Path

    def headline(self) -> str:
        return "no job of this run has started yet"

    def at(self) -> str | None:
        return str(self.path)

    def so(self) -> str | None:
        return "there is no outcome to tell"

    def help(self) -> tuple[Help, ...]:
        return (Help(f"unbroken status {quoted(self.path)}", "what is there"),)


@dataclass(eq=False, kw_only=True)
class RunsElsewhere(BusyError):
    """A job that is to be killed and whose process cannot be reached from here."""

    kind = "runs-elsewhere"
    path: Path
    holder: str
    reason: str

    def headline(self) -> str:
        return f"the job cannot be killed from here: {self.reason}"

    def at(self) -> str | None:
        return f"{self.path}  ({self.holder})"

    def so(self) -> str | None:
        return "no process was touched; without --force it is asked through the run directory, from any machine"

    def help(self) -> tuple[Help, ...]:
        return (Help(f"unbroken stop {quoted(self.path)}", "let it save and end at its next step"),)


@dataclass(eq=False, kw_only=True)
class StillRunning(BusyError):
    """A job that was asked to end and had not ended when the wait was over."""

    kind = "still-running"
    path: Path
    holder: str
    waited_s: float

    def headline(self) -> str:
        return f"the job has not ended within {amounts.duration(self.waited_s)}"

    def at(self) -> str | None:
        return f"{self.path}  ({self.holder})"

    def so(self) -> str | None:
        return "the request stands: it ends at its next step, once what it is saving is saved"

    def help(self) -> tuple[Help, ...]:
        return (
            Help(f"unbroken status {quoted(self.path)}", "see what it does"),
            Help(f"unbroken stop {quoted(self.path)} --force", "kill it, losing what is not committed"),
        )
