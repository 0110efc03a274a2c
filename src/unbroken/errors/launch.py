"""Errors of starting a job."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from unbroken.errors.tree import Help, UsageError, quoted


@dataclass(eq=False, kw_only=True)
class TorchMissing(UsageError):
    """Something needs torch, and this interpreter has none."""

    kind = "torch-missing"
    purpose: str

    def headline(self) -> str:
        return f"{self.purpose} needs torch, and it is not installed here"

    def so(self) -> str | None:
        return "nothing was started"

    def help(self) -> tuple[Help, ...]:
        return (Help("pip install 'unbroken[train]'", "install what trains"),)


@dataclass(eq=False, kw_only=True)
class ModuleMissing(UsageError):
    """A module that was to be run does not exist."""

    kind = "module-missing"
    module: str
    folder: Path

    def headline(self) -> str:
        return f"there is no module '{self.module}'"

    def at(self) -> str | None:
        return str(self.folder)

    def so(self) -> str | None:
        return "nothing was started; modules are looked for in this directory and among the installed packages"

    def help(self) -> tuple[Help, ...]:
        return (Help(f"ls {quoted(self.folder)}", "see what is there"),)


@dataclass(eq=False, kw_only=True)
class BadSpot(UsageError):
    """Spot notices that cannot be listened to as asked."""

    kind = "bad-spot"
    source: str
    value: str
    complaint: str

    def headline(self) -> str:
        return f"spot notices cannot be listened to: {self.complaint}"

    def at(self) -> str | None:
        return f"{self.source}={self.value}"

    def so(self) -> str | None:
        return "the job does not start: it would be taken away without having saved"

    def help(self) -> tuple[Help, ...]:
        return (Help("unbroken explain bad-spot", "what can be listened to, and where it is asked"),)


@dataclass(eq=False, kw_only=True)
class ManifestUnfit(UsageError):
    """A Kubernetes manifest that the cluster would refuse, or that would lose the run."""

    kind = "manifest-unfit"
    problems: tuple[str, ...]

    def headline(self) -> str:
        count = len(self.problems)
        return self.problems[0] if count == 1 else f"{count} things stand in the way of a manifest"

    def so(self) -> str | None:
        return "no manifest was written"

    def details(self) -> Iterator[str]:
        if len(self.problems) > 1:
            yield from self.problems

    def help(self) -> tuple[Help, ...]:
        return (Help("unbroken kubernetes --help", "every option, with its form"),)


@dataclass(eq=False, kw_only=True)
class SlurmMissing(UsageError):
    """A command of SLURM is needed, and there is none here."""

    kind = "slurm-missing"
    command: str

    def headline(self) -> str:
        return f"SLURM is not installed here: there is no `{self.command}`"

    def so(self) -> str | None:
        return "nothing was submitted; a script can be written anywhere and submitted on a login node"

    def help(self) -> tuple[Help, ...]:
        return (
            Help("unbroken slurm init --help", "write a script for a cluster"),
            Help("unbroken run --help", "start a job here, without SLURM"),
        )


@dataclass(eq=False, kw_only=True)
class SlurmRefused(UsageError):
    """SLURM did not take a job; ``words`` are its own."""

    kind = "slurm-refused"
    command: tuple[str, ...]
    code: int
    words: str
    before: tuple[str, ...] = ()

    def headline(self) -> str:
        return "SLURM did not take the job"

    def at(self) -> str | None:
        return " ".join(quoted(word) for word in self.command)

    def so(self) -> str | None:
        if self.before:
            return f"the chain ends behind what was submitted before: {', '.join(self.before)}"
        return "nothing was submitted"

    def details(self) -> Iterator[str]:
        yield from (line.strip() for line in self.words.splitlines() if line.strip())
        if not self.words.strip():
            yield f"{self.command[0]} ended with {self.code} and said nothing"

    def help(self) -> tuple[Help, ...]:
        return (
            Help("sinfo -s", "partitions, and what they allow"),
            Help("unbroken slurm init --help", "write the script with another partition, account or time"),
        )
