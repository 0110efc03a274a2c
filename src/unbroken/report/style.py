"""A few terminal styles. Owns the choice of when a stream gets colour; promises plain text everywhere else."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from unbroken.quoting.terminal import styled


class Stream(Protocol):
    """What is asked of a stream before it is coloured."""

    def isatty(self) -> bool:
        """Whether a person is looking."""


def wants_color(stream: Stream, environ: Mapping[str, str]) -> bool:
    """Colour goes to a terminal that can show it, unless ``NO_COLOR`` is set to anything."""
    return not environ.get("NO_COLOR") and environ.get("TERM") != "dumb" and stream.isatty()


@dataclass(frozen=True)
class Style:
    """Marks text for a terminal; gives it back untouched where colour is off."""

    color: bool

    def _marked(self, code: str, text: str) -> str:
        return styled(code, text) if self.color and text else text

    def bold(self, text: str) -> str:
        """What to look at first."""
        return self._marked("1", text)

    def dim(self, text: str) -> str:
        """What may be skipped."""
        return self._marked("2", text)

    def good(self, text: str) -> str:
        """What is well."""
        return self._marked("32", text)

    def warn(self, text: str) -> str:
        """What deserves a look."""
        return self._marked("33", text)

    def bad(self, text: str) -> str:
        """What is wrong."""
        return self._marked("1;31", text)
