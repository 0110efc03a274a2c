"""The declaration of a config field: meaning, bounds, resume class, beside its type and default in the dataclass.

The decoder, ``init``, ``explain``, the reference page and the resume comparison all read these declarations, so they
cannot disagree. The fields themselves are in ``sections``.
"""

import dataclasses
import types
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Any, Final, Literal, TypeVar, Union, get_args, get_origin

from unbroken.quoting.amounts import count

_KEY: Final = "unbroken"
_T = TypeVar("_T")


class ResumeClass(Enum):
    """What happens when a job resumes a run with a different value."""

    FIXED = "fixed"
    DECLARED = "declared"
    FREE = "free"

    @property
    def rule(self) -> str:
        """What the class means, in one sentence."""
        return _RULES[self]


_RULES: Final = {
    ResumeClass.FIXED: "cannot change: a resume with another value is an error",
    ResumeClass.DECLARED: "a resume may change it with --accept NAME; the journal records the change",
    ResumeClass.FREE: "every job may change it; the bits of the run do not depend on it",
}


@dataclass(frozen=True, kw_only=True)
class Declaration:
    """What is declared about a field beyond its type and default."""

    meaning: str
    resume: ResumeClass
    null_means: str | None = None
    minimum: float | None = None
    above: float | None = None
    maximum: float | None = None
    below: float | None = None
    example: Any = None


@dataclass(frozen=True, kw_only=True)
class ValueShape:
    """What a value may be, from the annotation: scalar types, words, null; or the curriculum's list of phases."""

    scalars: frozenset[type]
    words: tuple[str, ...]
    optional: bool
    is_curriculum: bool

    def __str__(self) -> str:
        if self.is_curriculum:
            kinds = ["list of phases"]
        else:
            named = {bool: "true or false", int: "whole number", float: "number", str: "text"}
            kinds = [text for kind, text in named.items() if kind in self.scalars]
            kinds += list(self.words)
        return ", ".join([*kinds, "null"] if self.optional else kinds)

    @property
    def expectation(self) -> str:
        """What is expected, as it follows ``must be``."""
        if self.is_curriculum:
            kinds = ["a list of phases"]
        else:
            named = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
            kinds = [text for kind, text in named.items() if kind in self.scalars] + list(self.words)
        *most, last = [*kinds, "null"] if self.optional else kinds
        return f"{', '.join(most)} or {last}" if most else last


@dataclass(frozen=True, kw_only=True)
class Field:
    """One field of one section: name, default, type and declaration."""

    section: str
    name: str
    default: Any
    shape: ValueShape
    declaration: Declaration

    @property
    def dotted(self) -> str:
        """The full name: ``optimizer.learning_rate``."""
        return f"{self.section}.{self.name}"

    @property
    def bounds(self) -> str:
        """The bounds in words, or an empty text."""
        said = self.declaration
        pairs = (("at least", said.minimum), ("above", said.above), ("at most", said.maximum), ("below", said.below))
        return ", ".join(f"{word} {_digits(limit)}" for word, limit in pairs if limit is not None)


def _digits(limit: float) -> str:
    return count(limit) if isinstance(limit, int) else f"{limit:g}"


def field(
    default: _T,
    meaning: str,
    resume: ResumeClass,
    *,
    null_means: str | None = None,
    minimum: float | None = None,
    above: float | None = None,
    maximum: float | None = None,
    below: float | None = None,
    example: object = None,
) -> _T:
    """Declare a field in a section's dataclass; ``init`` shows ``example`` in a comment where the default is null."""
    declaration = Declaration(
        meaning=meaning,
        resume=resume,
        null_means=null_means,
        minimum=minimum,
        above=above,
        maximum=maximum,
        below=below,
        example=example,
    )
    return dataclasses.field(default=default, metadata={_KEY: declaration})


@cache
def fields_of(section: str, cls: type) -> dict[str, Field]:
    """The declared fields of a section's dataclass, by name, in order of declaration."""
    return {field.name: field for field in _read_fields(section, cls)}


def _read_fields(section: str, cls: type) -> Iterator[Field]:
    for found in dataclasses.fields(cls):
        yield Field(
            section=section,
            name=found.name,
            default=found.default,
            shape=_shape(found.type),
            declaration=found.metadata[_KEY],
        )


def _shape(annotation: object) -> ValueShape:
    members = get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)
    words = [word for member in members if get_origin(member) is Literal for word in get_args(member)]
    return ValueShape(
        scalars=frozenset(member for member in members if member in (bool, int, float, str)),
        words=tuple(words),
        optional=types.NoneType in members,
        is_curriculum=any(get_origin(member) is tuple for member in members),
    )
