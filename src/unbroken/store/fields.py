"""Reading typed values out of decoded JSON, refusing everything else by name. Owns no format."""

import math
import re
from collections.abc import Mapping, Sequence, Set
from typing import Any


def as_number(value: object) -> float | None:
    """A number that JSON held; None if it is none or no float holds it. ``true`` is none."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


class Malformed(Exception):
    """A value in a record of ours is not of its type; the reader turns it into an error with a path."""


class Table:
    """One JSON object whose members are asked for by type."""

    def __init__(self, value: Any, name: str) -> None:  # noqa: ANN401 - whatever JSON held
        if not isinstance(value, dict):
            raise Malformed(f"{name} is not an object")
        self._values: dict[str, Any] = value
        self._name = name

    def _get(self, key: str) -> Any:  # noqa: ANN401
        if key not in self._values:
            raise Malformed(f"{self._name} lacks {key!r}")
        return self._values[key]

    def _wrong(self, key: str, wanted: str) -> Malformed:
        return Malformed(f"{key!r} in {self._name} is not {wanted}")

    def any(self, key: str) -> Any:  # noqa: ANN401 - whatever JSON held
        """A member of any type; null is one."""
        return self._get(key)

    def text(self, key: str) -> str:
        """A string."""
        value = self._get(key)
        if not isinstance(value, str):
            raise self._wrong(key, "text")
        return value

    def optional_text(self, key: str) -> str | None:
        """A string, or None where it is null."""
        return None if self._get(key) is None else self.text(key)

    def matching(self, key: str, pattern: re.Pattern[str]) -> str:
        """A string of a given form."""
        value = self.text(key)
        if not pattern.fullmatch(value):
            raise self._wrong(key, f"of the form {pattern.pattern}")
        return value

    def one_of(self, key: str, choices: Sequence[str]) -> str:
        """One of a few strings."""
        value = self.text(key)
        if value not in choices:
            raise self._wrong(key, f"one of {', '.join(choices)}")
        return value

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def has_value(self, key: str) -> bool:
        """Whether a member that must be there is anything but null."""
        return self._get(key) is not None

    def only(self, keys: Set[str]) -> None:
        """Pass if there is no member but these."""
        if unknown := sorted(self._values.keys() - keys):
            raise Malformed(f"{self._name} has an unknown member {unknown[0]!r}")

    def whole(self, key: str, *, below: int | None = None) -> int:
        """A whole number that is not negative; ``true`` is not 1."""
        value = self._get(key)
        if type(value) is not int or value < 0 or (below is not None and value >= below):
            raise self._wrong(key, "a whole number" if below is None else f"a whole number below {below}")
        return value

    def flag(self, key: str) -> bool:
        """True or false."""
        value = self._get(key)
        if not isinstance(value, bool):
            raise self._wrong(key, "true or false")
        return value

    def number(self, key: str) -> float:
        """A number; neither infinity nor what is none."""
        found = as_number(self._get(key))
        if found is None or not math.isfinite(found):
            raise self._wrong(key, "a number")
        return found

    def table(self, key: str) -> Mapping[str, Any]:
        """An object, taken as it is."""
        value = self._get(key)
        if not isinstance(value, dict):
            raise self._wrong(key, "an object")
        return value

    def texts(self, key: str) -> list[str]:
        """A list of strings."""
        value = self._get(key)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self._wrong(key, "a list of texts")
        return list(value)

    def rows(self, key: str) -> list["Table"]:
        """A list of objects."""
        value = self._get(key)
        if not isinstance(value, list):
            raise self._wrong(key, "a list")
        return [Table(item, f"{self._name}.{key}[{i}]") for i, item in enumerate(value)]
