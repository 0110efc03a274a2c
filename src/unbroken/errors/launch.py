"""Errors of starting jobs: packages, SLURM, Kubernetes, spot notices, and drills (prove, replay, demo)."""

from collections.abc import Iterator
from pathlib import Path

from unbroken.errors.tree import (
    CheckpointError,
    Each,
    ExactnessError,
    Help,
    InternalError,
    UsageError,
    quoted,
)

# ---- what is not installed ----


class PlatformUnsupported(UsageError):
    """This is not Linux; ``platform`` is ``sys.platform``."""

    kind = "platform-unsupported"
    platform: str
    HEADLINE = "unbroken runs on Linux only; this is {platform}"
    SO = "what keeps a checkpoint whole is checked on Linux file systems and nowhere else; nothing was started"

    def help(self) -> tuple[Help, ...]:
        if self.platform == "win32":
            return (Help("wsl --install", "Linux inside Windows; install unbroken there"),)
        container = 'docker run --rm -it --volume "$PWD:/work" --workdir /work python:3 bash'
        return (Help(container, "a Linux container in this folder; install unbroken there"),)


class TorchMissing(UsageError):
    """A command needs torch, and it is not installed."""

    kind = "torch-missing"
    purpose: str
    HEADLINE = "{purpose} needs torch, which is not installed"
    SO = "nothing was started"
    HELP = (Help("pip install 'unbroken[train]'", "install the training dependencies"),)


class PackageMissing(UsageError):
    """A command needs a package that is not installed."""

    kind = "package-missing"
    package: str
    purpose: str
    HEADLINE = "{purpose} needs the package '{package}', which is not installed"
    SO = "nothing was written"
    HELP = (Help("pip install 'unbroken[train]'", "install the training dependencies, with this package"),)


class TrackerMissing(UsageError):
    """The package of a tracker is not installed."""

    kind = "tracker-missing"
    tracker: str
    package: str
    HEADLINE = "the tracker {tracker} needs the package '{package}', which is not installed"
    SO = "nothing was started; metrics are recorded in the run's directory without a tracker, too"
    HELP = (Help("pip install 'unbroken[{tracker}]'", "install it"),)


class ModuleMissing(UsageError):
    """The module to run does not exist."""

    kind = "module-missing"
    module: str
    folder: Path
    HEADLINE = "no module named '{module}'"
    AT = "{folder}"
    SO = "nothing was started; modules are searched in this directory and in the installed packages"
    HELP = (Help("ls {folder:sh}", "list what is there"),)


# ---- schedulers ----


class SlurmMissing(UsageError):
    """A SLURM command is needed and not installed."""

    kind = "slurm-missing"
    command: str
    HEADLINE = "SLURM is not installed here: `{command}` not found"
    SO = "nothing was submitted; you can write the script anywhere and submit it on a login node"
    HELP = (
        Help("unbroken slurm init --help", "write a script for a cluster"),
        Help("unbroken run --help", "start a job here, without SLURM"),
    )


class SlurmRefused(UsageError):
    """SLURM rejected a job; ``words`` are its own."""

    kind = "slurm-refused"
    command: tuple[str, ...]
    code: int
    words: str
    before: tuple[str, ...] = ()
    HEADLINE = "SLURM rejected the job"
    HELP = (
        Help("sinfo -s", "list the partitions and their limits"),
        Help("unbroken slurm init --help", "write the script with another partition, account or time"),
    )

    def at(self) -> str | None:
        return " ".join(quoted(word) for word in self.command)

    def so(self) -> str | None:
        if self.before:
            return f"the chain ends after the jobs submitted so far: {', '.join(self.before)}"
        return "nothing was submitted"

    def details(self) -> Iterator[str]:
        yield from (line.strip() for line in self.words.splitlines() if line.strip())
        if not self.words.strip():
            yield f"{self.command[0]} exited with code {self.code} and printed nothing"


class ManifestUnfit(UsageError):
    """A Kubernetes manifest that the cluster would reject, or that would lose the run."""

    kind = "manifest-unfit"
    problems: tuple[str, ...]
    SO = "no manifest was written"
    HELP = (Help("unbroken kubernetes --help", "list the options"),)

    def headline(self) -> str:
        count = len(self.problems)
        return self.problems[0] if count == 1 else f"cannot write the manifest: {count} problems"

    def details(self) -> Iterator[str]:
        if len(self.problems) > 1:
            yield from self.problems


class BadSpot(UsageError):
    """A setting for spot notices that is not valid."""

    kind = "bad-spot"
    source: str
    value: str
    complaint: str
    HEADLINE = "cannot watch for spot notices: {complaint}"
    AT = "{source}={value}"
    SO = "the job does not start: it would be preempted without a save"
    HELP = (Help("unbroken explain {kind}", "which values are valid, and where to set them"),)


# ---- drills ----


class DrillUnreadable(UsageError):
    """``UNBROKEN_DRILL`` names a file that does not exist or is not a drill."""

    kind = "drill-unreadable"
    path: Path
    reason: str
    HEADLINE = "UNBROKEN_DRILL does not name a drill: {reason}"
    SO = "nothing was started; without the drill the job would write into the real run"
    HELP = (Help("unset UNBROKEN_DRILL", "if you meant to start a real job"),)


class NothingToProve(UsageError):
    """A command whose uninterrupted run leaves nothing to compare."""

    kind = "nothing-to-prove"
    command: str
    reason: str
    remedy: str
    log: tuple[str, ...] = ()
    HEADLINE = "nothing to prove: {reason}"
    AT = "{command}"
    SO = "{remedy}"
    HELP = (Help("unbroken explain {kind}", "what a command must do for prove to test it"),)

    def details(self) -> Iterator[str]:
        yield from _end_of(self.log)


class BaselineFails(UsageError):
    """A command that fails without being interrupted."""

    kind = "baseline-fails"
    command: str
    how: str
    log: tuple[str, ...] = ()
    HEADLINE = "the command fails without any interruption: {how}"
    AT = "{command}"
    HELP = (Help("unbroken explain {kind}", "how prove starts a command"),)

    def so(self) -> str | None:
        return "nothing was interrupted, and nothing is proven" if self.log else "it printed nothing before it ended"

    def details(self) -> Iterator[str]:
        yield from _end_of(self.log)


class NotDeterministic(ExactnessError):
    """Two uninterrupted runs of one command differ, so an interrupted one cannot be compared with them."""

    kind = "not-deterministic"
    exit_code = 3
    command: str
    differences: tuple[str, ...]
    causes: tuple[str, ...]
    HEADLINE = "the command is not deterministic: two uninterrupted runs differ"
    AT = "{command}"
    SO = "no interruption was tried: its effect could not be distinguished from this difference"
    HELP = (Help("unbroken explain {kind}", "the settings that make training deterministic"),)

    def details(self) -> Iterator[str]:
        yield from self.differences
        yield "likely causes:"
        yield from (f"- {cause}" for cause in self.causes)


class ReplayUnfinished(CheckpointError):
    """A replay ended before its last step; the exit code is that of its job."""

    kind = "replay-unfinished"
    run: Path
    checkpoint: str
    step: int
    reason: str
    log: Path
    log_tail: tuple[str, ...] = ()
    exit_code: int = 3  # type: ignore[misc]  # each job ends with its own
    HEADLINE = "the replay did not reach step {step:,}"
    AT = "{log}"
    SO = "nothing is proven about {checkpoint}; {run} was not changed"
    HELP = (
        Help("unbroken show {run:sh}@{checkpoint}", "show what it was saved with"),
        Help("unbroken explain {kind}", "what to check"),
    )

    def details(self) -> Iterator[str]:
        yield self.reason
        yield from (f"| {line}".rstrip() for line in self.log_tail)


class SourcesMissing(UsageError):
    """This Python has no sources of its standard library, which the demo uses as its corpus."""

    kind = "sources-missing"
    folder: Path
    HEADLINE = "this Python has no standard library sources, which the demo uses as its corpus"
    AT = "{folder}"
    SO = "nothing was trained; use an ordinary Python or a virtual environment made from one"
    HELP = (Help("ls {folder:sh}", "list what is there"),)


class DemoFailed(InternalError):
    """A command of the demo did not end as expected; ``log_tail`` is the end of its log."""

    kind = "demo-failed"
    stage: str
    expected: str
    ended: str
    log: Path
    log_tail: tuple[str, ...] = ()
    HEADLINE = "{stage} was expected to {expected}, but {ended}"
    AT = "{log}"
    DETAILS = Each("log_tail")
    HELP = (Help("less {log:sh}", "read the whole log"), Help("unbroken demo", "try again in a fresh folder"))

    def so(self) -> str | None:
        return "the demo stops here and has proven nothing; the log ends with:" if self.log_tail else "its log is empty"


def _end_of(log: tuple[str, ...]) -> Iterator[str]:
    if log:
        yield "the end of its output:"
        yield from (f"| {line}" for line in log)
