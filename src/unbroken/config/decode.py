"""Strict decoding of nodes into a config; all problems are collected and reported together.

Checks structure: unknown sections and fields (with the nearest known name), duplicates, types and bounds. Rules between
fields are in ``rules``.
"""

import difflib
import math
import re
from collections.abc import Iterator, Sequence
from collections.abc import Mapping as MappingType
from dataclasses import dataclass
from typing import Any, Final

from unbroken.config.document import SCHEMA, SECTIONS, Config, all_fields
from unbroken.config.fields import Field, ResumeClass
from unbroken.config.rules import Complaint, complaints
from unbroken.config.sections import CurriculumPhase
from unbroken.config.source import ListNode, Mapping, Node, Place, Scalar, described, shown
from unbroken.errors import ConfigInvalid, Problem

# ---- single values ----

_WHOLE: Final = re.compile(r"[+-]?(0|[1-9][0-9_]*)")
_NUMBER: Final = re.compile(r"[+-]?([0-9][0-9_]*)?(\.[0-9_]*)?([eE][+-]?[0-9]{1,4})?")
_NOT_FINITE: Final = re.compile(r"[+-]?\.?(inf|infinity|nan)", re.IGNORECASE)
_SWITCH: Final = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
# Above this a float cannot represent every integer, so 1e17 may not be the number that was meant.
_EXACT_FLOAT: Final = 2**53
_LARGEST: Final = 2**63 - 1
_LONGEST_NUMBER: Final = 60


class InvalidValue(Exception):
    """A value that does not fit its field: the complaint, and the nearest valid word."""

    def __init__(self, complaint: str, nearest: str | None = None) -> None:
        super().__init__(complaint)
        self.complaint = complaint
        self.nearest = nearest


def decode_value(field: Field, node: Node) -> Any:  # noqa: ANN401 -- each field has its own type
    """The value of a scalar field.

    Raises:
        InvalidValue: the node does not fit the field.
    """
    shape = field.shape
    if not isinstance(node, Scalar):
        raise InvalidValue(f"must be {shape.expectation}, is {described(node)}")
    if node.is_null:
        if shape.optional:
            return None
        raise InvalidValue(
            f"must be {shape.expectation}, has no value" if node.text == "" else f"must be {shape.expectation}, is null"
        )
    if node.text in shape.words:
        return node.text
    if str in shape.scalars:
        if "\0" in node.text:
            raise InvalidValue("must be text without NUL")
        return node.text
    value = _decode_typed(field, node)
    _check_bounds(field, value)
    return True if shape.scalars == {bool, int} and value == 1 else value


def _decode_typed(field: Field, node: Scalar) -> bool | int | float:
    kinds = field.shape.scalars
    if not kinds:
        close = difflib.get_close_matches(node.text, field.shape.words, n=1)
        raise InvalidValue(f"must be {field.shape.expectation}, is {described(node)}", close[0] if close else None)
    if not node.is_plain:
        raise InvalidValue(f"must be {field.shape.expectation}, is the text {described(node)}; write it without quotes")
    if bool in kinds and (switch := _SWITCH.get(node.text.lower())) is not None:
        return switch
    if int in kinds:
        whole = whole_number(node.text)
        if whole is not None:
            return whole
    if float in kinds:
        return number(node, f"must be {field.shape.expectation}")
    raise InvalidValue(f"must be {field.shape.expectation}, is {described(node)}")


def whole_number(text: str) -> int | None:
    """A whole number: ``5_000_000_000``, ``1e3``; None if the text is not one.

    Raises:
        InvalidValue: it is too large.
    """
    if len(text) > _LONGEST_NUMBER:
        return None
    if _WHOLE.fullmatch(text):
        value = int(text.replace("_", "")) if not text.endswith("_") else None
    elif re.search("[.eE]", text) and (amount := _float(text)) is not None and amount.is_integer():
        if abs(amount) > _EXACT_FLOAT:
            raise InvalidValue(f"is {text}, which has no exact value in this notation; write all its digits")
        value = int(amount)
    else:
        return None
    if value is not None and abs(value) > _LARGEST:
        raise InvalidValue(f"is {text}, which is larger than 2^63 - 1")
    return value


def number(node: Scalar, expectation: str) -> float:
    """A finite number: ``1e-4``, ``0.1``, ``3``.

    Raises:
        InvalidValue: it is not one.
    """
    if _NOT_FINITE.fullmatch(node.text):
        raise InvalidValue(f"must be finite, is {node.text}")
    amount = _float(node.text) if node.is_plain else None
    if amount is None:
        raise InvalidValue(f"{expectation}, is {described(node)}")
    if not math.isfinite(amount):
        raise InvalidValue(f"is {node.text}, which is too large for a number")
    return amount


def _float(text: str) -> float | None:
    match = _NUMBER.fullmatch(text)
    if match is None or len(text) > _LONGEST_NUMBER or not re.search(r"[0-9]", (match[1] or "") + (match[2] or "")):
        return None
    return float(text.replace("_", ""))


def _check_bounds(field: Field, value: bool | int | float) -> None:
    if isinstance(value, bool):
        return
    said = field.declaration
    is_within = (
        (said.minimum is None or value >= said.minimum)
        and (said.above is None or value > said.above)
        and (said.maximum is None or value <= said.maximum)
        and (said.below is None or value < said.below)
    )
    if not is_within:
        raise InvalidValue(f"must be {field.bounds}, is {value}")


# ---- whole documents ----

DEFAULT: Final = Place("default")
CURRICULUM: Final = "data.curriculum"
_PHASE_KEYS: Final = ("duration_tokens", "mix")


@dataclass(frozen=True)
class Resolved:
    """A valid config, and where each value came from.

    Attributes:
        config: The config.
        origins: For each field, where its value came from: default, preset, file and line, or command line.
    """

    config: Config
    origins: MappingType[str, Place]

    @property
    def defaulted(self) -> tuple[str, ...]:
        """The fields that were not set. In a run's record these are the fields newer than the record."""
        return tuple(name for name, place in self.origins.items() if place == DEFAULT)


def decode(
    root: Mapping | None,
    overrides: Sequence[tuple[Scalar, Node]] = (),
    *,
    start: Config | None = None,
    start_place: Place = DEFAULT,
    source: str = "config",
    is_record: bool = False,
) -> Resolved:
    """Apply a file's nodes and then the overrides to ``start``; ``source`` is named where a required value is missing.

    For a run's record (``is_record``), rules about free fields are not checked: every job may change them.

    Raises:
        ConfigInvalid: there are problems; all of them are in it.
    """
    decoder = _Decoder()
    if root is not None:
        decoder.take_root(root)
    for name, node in overrides:
        decoder.take_override(name, node)
    config = _built(start or Config(), decoder.values)
    origins = dict.fromkeys(all_fields(), start_place) | decoder.origins
    for complaint in complaints(config):
        # An older version had fewer rules, and its runs must still open.
        if not (is_record and _is_of_a_job(complaint)):
            decoder.take_complaint(complaint, origins, start_place, source)
    if decoder.problems:
        raise ConfigInvalid(problems=tuple(sorted(decoder.problems, key=_reading_order)))
    return Resolved(config, origins)


def _reading_order(problem: Problem) -> tuple[bool, float]:
    # A missing value has no line: list it after the problems that have one.
    return problem.source == "command line", problem.line or math.inf


def _built(start: Config, values: dict[str, Any]) -> Config:
    sections = {}
    for section, cls in SECTIONS.items():
        names = [name for name in all_fields() if name.startswith(f"{section}.")]
        given = {name: values[name] if name in values else start.value(name) for name in names}
        sections[section] = cls(**{name.partition(".")[2]: value for name, value in given.items()})
    return Config(**sections)


class _Decoder:
    """Values, origins and problems as they are found."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.origins: dict[str, Place] = {}
        self.problems: list[Problem] = []
        self.failed: set[str] = set()

    def complain(
        self, place: Place, field: str, complaint: str, nearest: str | None = None, topic: str | None = None
    ) -> None:
        """Record a problem and continue."""
        self.problems.append(Problem(place.source, place.line, shown(field), complaint, nearest, topic))

    def take_root(self, root: Mapping) -> None:
        """Decode a file's top level."""
        entries = list(self.entries(root, ""))
        is_record = any(key.text == "schema" and isinstance(v, Scalar) and v.text == SCHEMA for key, v in entries)
        for key, node in entries:
            if key.text in SECTIONS:
                self.take_section(key.text, node)
            elif not (is_record and key.text in ("schema", "digest")):
                nearest = _nearest_section(key.text)
                complaint = "is not a section; a config has model, data, optimizer and training"
                self.complain(key.place, key.text, complaint, nearest, nearest)

    def take_section(self, section: str, node: Node) -> None:
        """Decode one section; an empty one changes nothing."""
        if isinstance(node, Scalar) and node.is_null:
            return
        if not isinstance(node, Mapping):
            self.complain(node.place, section, f"must hold fields, is {described(node)}", topic=section)
            return
        for key, value in self.entries(node, f"{section}."):
            self.take_field(f"{section}.{key.text}", key.place, value)

    def take_override(self, name: Scalar, node: Node) -> None:
        """Decode one value from the command line; it overrides the file's."""
        self.take_field(name.text, name.place, node)

    def take_field(self, dotted: str, place: Place, node: Node) -> None:
        """Decode the value of one field."""
        field = all_fields().get(dotted)
        if field is None:
            nearest = _nearest_field(dotted)
            section = dotted.partition(".")[0]
            is_known = section in SECTIONS
            complaint = (
                f"is not a field of {section}" if is_known else f"is not a field: there is no section {shown(section)}"
            )
            self.complain(place, dotted, complaint, nearest, nearest or (section if is_known else None))
            return
        try:
            value = self.curriculum(field, node) if field.shape.is_curriculum else decode_value(field, node)
        except InvalidValue as refusal:
            self.failed.add(dotted)
            self.complain(node.place, dotted, refusal.complaint, refusal.nearest, dotted)
            return
        self.values[dotted] = value
        self.origins[dotted] = place

    def entries(self, mapping: Mapping, prefix: str) -> Iterator[tuple[Scalar, Node]]:
        """A mapping's entries; a duplicate key is a problem."""
        first: dict[str, Place] = {}
        for key, node in mapping.entries:
            if key.text in first:
                where = f", first on line {first[key.text].line}" if first[key.text].line else ""
                topic = prefix.partition("[")[0].rstrip(".") or None
                self.complain(key.place, f"{prefix}{key.text}", f"is given twice{where}", topic=topic)
                continue
            first[key.text] = key.place
            yield key, node

    def curriculum(self, field: Field, node: Node) -> tuple[CurriculumPhase, ...] | None:
        """The phases; a problem names the phase by its index."""
        if isinstance(node, Scalar) and node.is_null:
            return None
        if not isinstance(node, ListNode) or not node.items:
            raise InvalidValue(
                f"must be {field.shape.expectation}, is {'empty' if isinstance(node, ListNode) else described(node)}"
            )
        phases = [self.phase(item, f"{CURRICULUM}[{i}]") for i, item in enumerate(node.items)]
        return tuple(phase for phase in phases if phase is not None)

    def phase(self, node: Node, name: str) -> CurriculumPhase | None:
        """One phase, or None with its problems recorded."""
        if not isinstance(node, Mapping):
            complaint = f"must hold duration_tokens and mix, is {described(node)}"
            self.complain(node.place, name, complaint, topic=CURRICULUM)
            return None
        found: dict[str, Node] = {}
        before = len(self.problems)
        for key, value in self.entries(node, f"{name}."):
            if key.text in _PHASE_KEYS:
                found[key.text] = value
            else:
                close = difflib.get_close_matches(key.text, _PHASE_KEYS, n=1)
                complaint = "is not a field of a phase; a phase has duration_tokens and mix"
                self.complain(key.place, f"{name}.{key.text}", complaint, close[0] if close else None, CURRICULUM)
        for key_text in _PHASE_KEYS:
            if key_text not in found:
                self.complain(node.place, f"{name}.{key_text}", "is missing", topic=CURRICULUM)
        duration = self.duration(found.get("duration_tokens"), f"{name}.duration_tokens")
        mix = self.mix(found.get("mix"), f"{name}.mix")
        return CurriculumPhase(duration, mix) if len(self.problems) == before else None

    def duration(self, node: Node | None, name: str) -> int:
        """A phase's length; 0 with the problem recorded."""
        if node is None:
            return 0
        try:
            value = whole_number(node.text) if isinstance(node, Scalar) and node.is_plain else None
            if value is None or value < 1:
                raise InvalidValue(f"must be a whole number above 0, is {described(node)}")
        except InvalidValue as refusal:
            self.complain(node.place, name, refusal.complaint, topic=CURRICULUM)
            return 0
        return value

    def mix(self, node: Node | None, name: str) -> tuple[tuple[str, float], ...]:
        """Buckets with their weights, sorted; empty with the problems recorded."""
        if node is None:
            return ()
        if not isinstance(node, Mapping) or not node.entries:
            is_empty = isinstance(node, Mapping)
            complaint = f"must name buckets with weights, is {'empty' if is_empty else described(node)}"
            self.complain(node.place, name, complaint, topic=CURRICULUM)
            return ()
        weights: dict[str, float] = {}
        before = len(self.problems)
        for key, value in self.entries(node, f"{name}."):
            try:
                weights[key.text] = _weight(key.text, value)
            except InvalidValue as refusal:
                self.complain(value.place, f"{name}.{key.text}", refusal.complaint, topic=CURRICULUM)
        if len(self.problems) == before and not any(weights.values()):
            self.complain(node.place, name, "must have a weight above 0; all are 0", topic=CURRICULUM)
        return tuple(sorted(weights.items()))

    def take_complaint(self, complaint: Complaint, origins: dict[str, Place], start_place: Place, source: str) -> None:
        """Record a broken rule between fields, unless one of the fields could not be decoded."""
        if self.failed.isdisjoint(complaint.fields):
            changed = [name for name in complaint.fields if origins[name] != start_place]
            blamed = complaint.fields[0] if complaint.fields[0] in changed or not changed else changed[0]
            place = origins[blamed] if changed else Place(source)
            self.complain(place, complaint.fields[0], complaint.text, topic=complaint.fields[0])


def _is_of_a_job(complaint: Complaint) -> bool:
    return all_fields()[complaint.fields[0]].declaration.resume is ResumeClass.FREE


def _weight(bucket: str, node: Node) -> float:
    if bucket in ("", ".", "..") or "/" in bucket or "\0" in bucket:
        raise InvalidValue("is not a folder name")
    if not isinstance(node, Scalar):
        raise InvalidValue(f"must be a number, is {described(node)}")
    weight = number(node, "must be a number")
    if weight < 0:
        raise InvalidValue(f"must be at least 0, is {described(node)}")
    return weight


def _nearest_section(name: str) -> str | None:
    # A field written at the top level belongs into a section.
    for dotted in all_fields():
        if dotted.partition(".")[2] == name:
            return dotted
    close = difflib.get_close_matches(name, list(SECTIONS), n=1) or difflib.get_close_matches(name, all_fields(), n=1)
    return close[0] if close else None


def _nearest_field(dotted: str) -> str | None:
    section, _, name = dotted.partition(".")
    names = {field: field.partition(".")[2] for field in all_fields()}
    for field, known in names.items():
        if known == name:
            return field
    own = [known for field, known in names.items() if field.startswith(f"{section}.")]
    # Common abbreviations: lr, wd.
    if short := [known for known in own if "".join(word[:1] for word in known.split("_")) == name]:
        return f"{section}.{short[0]}"
    if close := difflib.get_close_matches(name, own, n=1):
        return f"{section}.{close[0]}"
    # By the name alone: a section in common would make any two short names look alike.
    anywhere = difflib.get_close_matches(name, list(names.values()), n=1, cutoff=0.75)
    return next((field for field, known in names.items() if known in anywhere), None)
