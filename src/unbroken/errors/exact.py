"""Errors of training with the same bits on any number of ranks."""

from collections.abc import Iterator
from dataclasses import dataclass

from unbroken.errors.tree import ExactnessError, Help, UsageError
from unbroken.quoting.amounts import plural


@dataclass(eq=False, kw_only=True)
class TooManyRanks(UsageError):
    """More ranks than lanes: some would never have anything to do."""

    kind = "too-many-ranks"
    ranks: int
    lanes: int

    def headline(self) -> str:
        return f"there are {plural(self.ranks, 'rank')}, and a step has {plural(self.lanes, 'lane')}"

    def so(self) -> str | None:
        return f"start at most {plural(self.lanes, 'rank')}; another number of lanes would be another training"

    def help(self) -> tuple[Help, ...]:
        return (Help(f"unbroken explain {self.kind}", "how lanes are dealt to ranks"),)


@dataclass(eq=False, kw_only=True)
class LaneBroken(UsageError):
    """A lane that was not computed as lanes are: one micro-batch, one backward."""

    kind = "lane-broken"
    complaint: str

    def headline(self) -> str:
        return self.complaint

    def so(self) -> str | None:
        return "the step is not summed; its gradients are not those of all lanes"

    def help(self) -> tuple[Help, ...]:
        return (Help(f"unbroken explain {self.kind}", "what the body of a lane looks like"),)


@dataclass(eq=False, kw_only=True)
class CannotFold(UsageError):
    """A model, a parameter or an optimizer whose gradients cannot be summed with the same bits on any world."""

    kind = "cannot-fold"
    name: str
    reason: str

    def headline(self) -> str:
        return f"'{self.name}' cannot take part in an exact sum: {self.reason}"

    def so(self) -> str | None:
        return "nothing was changed; the bits would depend on the number of ranks"

    def help(self) -> tuple[Help, ...]:
        return (Help(f"unbroken explain {self.kind}", "what can, and what to do about the rest"),)


@dataclass(eq=False, kw_only=True)
class ArithmeticDiffers(ExactnessError):
    """This process computes in another way than the one that saved; the bits would differ from here on."""

    kind = "arithmetic-differs"
    differences: tuple[tuple[str, str, str], ...]

    def headline(self) -> str:
        names = ", ".join(name for name, _, _ in self.differences[:4])
        more = f" and {len(self.differences) - 4} more" if len(self.differences) > 4 else ""
        return f"this process does not compute as the one that saved: {names}{more}"

    def so(self) -> str | None:
        return "a resume would not give the same bits as one long job"

    def details(self) -> Iterator[str]:
        for name, saved, here in self.differences[:4]:
            yield f"{name}: {saved} in the checkpoint, {here} here"
        if len(self.differences) > 4:
            # By name at least: who accepts them needs every one.
            yield f"and {len(self.differences) - 4} more: {', '.join(name for name, _, _ in self.differences[4:])}"

    def help(self) -> tuple[Help, ...]:
        return (Help(f"unbroken explain {self.kind}", "what each name means and how to accept it"),)
