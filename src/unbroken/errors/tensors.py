"""Errors of tensors that cannot be kept."""

from dataclasses import dataclass

from unbroken.errors.tree import Help, UsageError


@dataclass(eq=False, kw_only=True)
class TensorUnsupported(UsageError):
    """A tensor that a checkpoint cannot hold, or on which the ranks do not agree."""

    kind = "tensor-unsupported"
    name: str
    reason: str
    rank: int | None = None

    def headline(self) -> str:
        return f"the tensor '{self.name}' cannot be saved: {self.reason}"

    def at(self) -> str | None:
        return None if self.rank is None else f"rank {self.rank}"

    def so(self) -> str | None:
        return "nothing was written; a checkpoint without it could not be resumed from"

    def help(self) -> tuple[Help, ...]:
        return (Help(f"unbroken explain {self.kind}", "which tensors can be saved, and what to hand over instead"),)
