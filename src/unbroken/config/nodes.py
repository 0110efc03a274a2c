"""A config as it stands on the page, before any field gives it a type: texts, lists and mappings, each with its place.

File, JSON document and command line all become these nodes, so one decoder serves the three.
"""

import json
from collections.abc import Mapping as MappingType
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

_SHOWN: Final = 60


@dataclass(frozen=True)
class Place:
    """Where something stands: a file with its line, or the command line."""

    source: str
    line: int | None = None

    def __str__(self) -> str:
        return self.source if self.line is None else f"{self.source}:{self.line}"


@dataclass(frozen=True)
class Scalar:
    """One text; ``is_plain`` where it was written without quotes and may stand for a number, a claim or null."""

    text: str
    is_plain: bool
    place: Place

    @property
    def is_null(self) -> bool:
        """Whether it stands for the absence of a value."""
        return self.is_plain and self.text in ("", "~", "null", "Null", "NULL")


@dataclass(frozen=True)
class Listing:
    """A list."""

    items: tuple["Node", ...]
    place: Place


@dataclass(frozen=True)
class Mapping:
    """Keys with values in the order they were written; a key may occur twice, which the decoder reports."""

    entries: tuple[tuple[Scalar, "Node"], ...]
    place: Place


Node: TypeAlias = Scalar | Listing | Mapping


def from_document(value: Any, place: Place) -> Node:  # noqa: ANN401 -- JSON is any
    """The nodes of a JSON document that is already in memory.

    Raises:
        TypeError: the document holds something that is not JSON.
    """
    match value:
        case str():
            return Scalar(value, is_plain=False, place=place)
        case None | bool() | int() | float():
            return Scalar(json.dumps(value), is_plain=True, place=place)
        case list() | tuple():
            return Listing(tuple(from_document(item, place) for item in value), place)
        case MappingType():
            entries = ((Scalar(str(key), False, place), from_document(item, place)) for key, item in value.items())
            return Mapping(tuple(entries), place)
    raise TypeError(f"{type(value).__name__} is not JSON")


def shown(text: str) -> str:
    """A text from a file, fit for one line of a message: not endless, and without characters that move the cursor."""
    text = text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."
    return text if text.isprintable() else json.dumps(text)[1:-1]


def described(node: Node) -> str:
    """What a node is, for a complaint about it."""
    match node:
        case Listing():
            return "a list"
        case Mapping():
            return "a section of its own"
    if node.is_null:
        return "null"
    return shown(node.text) if node.is_plain else f'"{shown(node.text)}"'
