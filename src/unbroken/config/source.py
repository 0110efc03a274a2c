"""Reads YAML or JSON into nodes with line numbers.

Types are not resolved here: YAML would read ``3e-4`` as text and a bucket called ``on`` as a boolean. The work for a
hostile file is bounded: size, depth and the number of nodes after aliases are limited, tags are errors, and no object
is ever constructed.
"""

import errno
import json
import os
import re
from collections.abc import Mapping as MappingType
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

from unbroken.errors import ConfigUnreadable, PathMissing

# ---- nodes ----

_SHOWN: Final = 60


@dataclass(frozen=True)
class Place:
    """A file with its line, or the command line."""

    source: str
    line: int | None = None

    def __str__(self) -> str:
        return self.source if self.line is None else f"{self.source}:{self.line}"


@dataclass(frozen=True)
class Scalar:
    """One text; ``is_plain`` if it was written without quotes and may be a number, a boolean or null."""

    text: str
    is_plain: bool
    place: Place

    @property
    def is_null(self) -> bool:
        """Whether it is null."""
        return self.is_plain and self.text in ("", "~", "null", "Null", "NULL")


@dataclass(frozen=True)
class ListNode:
    """A list."""

    items: tuple["Node", ...]
    place: Place


@dataclass(frozen=True)
class Mapping:
    """Keys with values in order; a key may occur twice, which the decoder reports."""

    entries: tuple[tuple[Scalar, "Node"], ...]
    place: Place


Node: TypeAlias = Scalar | ListNode | Mapping


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
            return ListNode(tuple(from_document(item, place) for item in value), place)
        case MappingType():
            entries = ((Scalar(str(key), False, place), from_document(item, place)) for key, item in value.items())
            return Mapping(tuple(entries), place)
    raise TypeError(f"{type(value).__name__} is not JSON")


def shown(text: str) -> str:
    """A text from a file for one line of a message: shortened, control characters escaped."""
    text = text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."
    return text if text.isprintable() else json.dumps(text)[1:-1]


def described(node: Node) -> str:
    """What a node is, for a message."""
    match node:
        case ListNode():
            return "a list"
        case Mapping():
            return "a section of its own"
    if node.is_null:
        return "null"
    return shown(node.text) if node.is_plain else f'"{shown(node.text)}"'


# ---- reading ----

MAX_BYTES: Final = 1 << 20
MAX_DEPTH: Final = 32
MAX_NODES: Final = 20_000

_SURROGATE_PAIR: Final = re.compile(r"\\\\|\\u([dD][89abAB][0-9a-fA-F]{2})\\u([dD][c-fC-F][0-9a-fA-F]{2})")

_NOT_IN_YAML: Final = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")


def read(path: Path) -> Mapping:
    """Read a config file; its top level is a mapping.

    Raises:
        PathMissing: there is no such file.
        ConfigUnreadable: it is not a YAML or JSON mapping.
    """
    data = _read_bytes(path)
    if b"\0" in data:
        raise ConfigUnreadable(path=path, complaint="it is binary, not text")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as refusal:
        line = data.count(b"\n", 0, refusal.start) + 1
        raise ConfigUnreadable(path=path, complaint="it is not UTF-8 text", line=line) from refusal
    node = parse(text, str(path))
    if node is None:
        raise ConfigUnreadable(path=path, complaint="it is empty")
    if not isinstance(node, Mapping):
        complaint = "its top level must be a mapping with the sections model, data, optimizer, training"
        raise ConfigUnreadable(path=path, complaint=complaint, line=node.place.line)
    return node


def _read_bytes(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError) as refusal:
        raise PathMissing(path=path, purpose="config file") from refusal
    except IsADirectoryError as refusal:
        raise ConfigUnreadable(path=path, complaint="it is a directory") from refusal
    except OSError as refusal:
        cause = os.strerror(refusal.errno or errno.EIO)
        raise ConfigUnreadable(path=path, complaint=cause) from refusal
    except ValueError as refusal:  # a NUL in the path itself
        raise PathMissing(path=path, purpose="config file") from refusal
    if len(data) > MAX_BYTES:
        raise ConfigUnreadable(path=path, complaint=f"it is larger than {MAX_BYTES >> 20} MiB")
    return data


def parse(text: str, source: str, *, has_lines: bool = True) -> Node | None:
    """The nodes of a text; None if it holds nothing but blanks and comments.

    Raises:
        ConfigUnreadable: the text is not YAML.
    """
    # Imported here: the commands that read no config do not pay for it.
    import yaml

    if text.lstrip()[:1] == "{" or source.endswith(".json"):
        text = _json_as_yaml(text)
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    composer = _Composer(source, has_lines)
    try:
        for event in yaml.parse(text, Loader=loader):
            composer.take(event)
    except yaml.MarkedYAMLError as refusal:
        line = None if refusal.problem_mark is None else refusal.problem_mark.line + 1
        complaint = refusal.problem or refusal.context or "it is not YAML"
        raise ConfigUnreadable(path=Path(source), complaint=complaint, line=line) from refusal
    except yaml.reader.ReaderError as refusal:
        # One parser counts bytes and the other characters; the character itself is the same in both.
        code = refusal.character if isinstance(refusal.character, int) else ord(refusal.character)
        line = text.count("\n", 0, text.find(chr(code))) + 1
        complaint = f"the character #x{code:04x} is not allowed"
        raise ConfigUnreadable(path=Path(source), complaint=complaint, line=line) from refusal
    return composer.root


def _json_as_yaml(text: str) -> str:
    # JSON lets a tab stand between tokens, where YAML does not; inside its strings a raw tab is not allowed at all.
    # It writes characters beyond the 16-bit range as two escapes, which YAML takes for two broken ones, and lets
    # characters stand in strings that YAML takes for line breaks or refuses.
    def joined(match: re.Match[str]) -> str:
        if match[1] is None:
            return match[0]
        return bytes.fromhex(match[1] + match[2]).decode("utf-16-be")

    escaped = _NOT_IN_YAML.sub(lambda match: f"\\u{ord(match[0]):04x}", text.replace("\t", " "))
    return _SURROGATE_PAIR.sub(joined, escaped)


class _Open:
    """A list or mapping that is not complete yet."""

    def __init__(self, place: Place, anchor: str | None, is_mapping: bool) -> None:
        self.place = place
        self.anchor = anchor
        self.is_mapping = is_mapping
        self.key: Scalar | None = None
        self.items: list[Node] = []
        self.entries: list[tuple[Scalar, Node]] = []
        self.count = 1


class _Composer:
    """Builds nodes from parser events with its own stack, so that deep nesting cannot exhaust the interpreter's."""

    def __init__(self, source: str, has_lines: bool) -> None:
        self.source = source
        self.has_lines = has_lines
        self.root: Node | None = None
        self.stack: list[_Open] = []
        # An anchor is registered when its node is complete, so an alias cannot contain itself.
        self.anchors: dict[str, tuple[Node, int]] = {}

    def take(self, event: Any) -> None:  # noqa: ANN401 -- the parsers share no typed class
        """Process the parser's next event."""
        place = Place(self.source, event.start_mark.line + 1 if self.has_lines else None)
        # By name: the fast and the plain parser share the classes, and yaml is not imported at the top.
        match type(event).__name__:
            case "ScalarEvent":
                self._refuse_tag(event, place)
                scalar = Scalar(event.value, is_plain=not event.style, place=place)
                self._remember(event.anchor, scalar, 1)
                self._add(scalar, 1)
            case "AliasEvent":
                if event.anchor not in self.anchors:
                    self._refuse(f"the alias *{shown(event.anchor)} refers to nothing that is defined before it", place)
                self._add(*self.anchors[event.anchor])
            case "MappingStartEvent" | "SequenceStartEvent" as name:
                self._refuse_tag(event, place)
                if len(self.stack) == MAX_DEPTH:
                    self._refuse(f"it is nested more than {MAX_DEPTH} deep", place)
                self.stack.append(_Open(place, event.anchor, name == "MappingStartEvent"))
            case "MappingEndEvent" | "SequenceEndEvent":
                self._close(self.stack.pop())
            case "DocumentStartEvent" if self.root is not None:
                self._refuse("it holds more than one document", place)

    def _close(self, done: _Open) -> None:
        node = (
            Mapping(tuple(_merged(done.entries)), done.place)
            if done.is_mapping
            else ListNode(tuple(done.items), done.place)
        )
        self._remember(done.anchor, node, done.count)
        self._add(node, done.count)

    def _remember(self, anchor: str | None, node: Node, count: int) -> None:
        if anchor is not None:
            self.anchors[anchor] = node, count

    def _add(self, node: Node, count: int) -> None:
        if not self.stack:
            # `# only comments` parses as one null at the top.
            self.root = None if isinstance(node, Scalar) and node.is_null else node
            return
        top = self.stack[-1]
        top.count += count
        if top.count > MAX_NODES:
            self._refuse(f"it holds more than {MAX_NODES:,} values", node.place)
        if not top.is_mapping:
            top.items.append(node)
        elif top.key is not None:
            top.entries.append((top.key, node))
            top.key = None
        elif isinstance(node, Scalar):
            top.key = node
        else:
            self._refuse("a key is a list or a mapping", node.place)

    def _refuse_tag(self, event: Any, place: Place) -> None:  # noqa: ANN401
        if event.tag is not None:
            self._refuse(f"the tag {shown(event.tag)} is not supported", place)

    def _refuse(self, complaint: str, place: Place) -> None:
        raise ConfigUnreadable(path=Path(self.source), complaint=complaint, line=place.line)


def _merged(entries: list[tuple[Scalar, Node]]) -> list[tuple[Scalar, Node]]:
    """The entries with ``<<: *other`` expanded; explicit keys win."""
    own = [(key, value) for key, value in entries if not _is_merge(key, value)]
    known = {key.text for key, _ in own}
    for key, value in entries:
        if _is_merge(key, value):
            for mapping in value.items if isinstance(value, ListNode) else (value,):
                assert isinstance(mapping, Mapping)
                for inner, node in mapping.entries:
                    if inner.text not in known:
                        known.add(inner.text)
                        own.append((inner, node))
    return own


def _is_merge(key: Scalar, value: Node) -> bool:
    if not key.is_plain or key.text != "<<":
        return False
    parts = value.items if isinstance(value, ListNode) else (value,)
    return all(isinstance(part, Mapping) for part in parts)
