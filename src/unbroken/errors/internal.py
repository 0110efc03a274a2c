"""Our own bugs, said as such."""

from dataclasses import dataclass

from unbroken.errors.tree import InternalError


@dataclass(eq=False, kw_only=True)
class Bug(InternalError):
    """Something that should be impossible; shown without a traceback unless one is asked for."""

    kind = "internal-error"
    cause: str

    def headline(self) -> str:
        return f"this is a bug in unbroken: {self.cause}"

    def so(self) -> str | None:
        return "set UNBROKEN_TRACEBACK=1 and run the command again to see where it happened"
