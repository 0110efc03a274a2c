"""A few terminal styles, and when a stream gets colour; plain text otherwise."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from unbroken.quoting.terminal import styled


class TerminalStream(Protocol):
    """A stream that may be a terminal."""

    def isatty(self) -> bool:
        """Whether it is a terminal."""


def wants_color(stream: TerminalStream, environ: Mapping[str, str]) -> bool:
    """Whether to use colour: on a terminal that is not dumb, unless ``NO_COLOR`` is set."""
    return not environ.get("NO_COLOR") and environ.get("TERM") != "dumb" and stream.isatty()


@dataclass(frozen=True)
class Style:
    """Styles text; returns it unchanged if colour is off."""

    color: bool

    def _marked(self, code: str, text: str) -> str:
        return styled(code, text) if self.color and text else text

    def bold(self, text: str) -> str:
        """Emphasis."""
        return self._marked("1", text)

    def dim(self, text: str) -> str:
        """Labels and remarks."""
        return self._marked("2", text)

    def good(self, text: str) -> str:
        """Success."""
        return self._marked("32", text)

    def warn(self, text: str) -> str:
        """A warning."""
        return self._marked("33", text)

    def bad(self, text: str) -> str:
        """An error."""
        return self._marked("1;31", text)
