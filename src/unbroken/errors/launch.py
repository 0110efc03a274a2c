"""Errors of starting a job."""

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
