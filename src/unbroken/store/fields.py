"""Reading JSON and typed values out of it; anything else is an error that names the field. Owns no format.

Numbers are bounded here, once, so that no arithmetic behind a reader can overflow: whole numbers fit into 64 bits,
others are finite and no larger than any duration or rate can be, instants lie within the calendar.
"""

import json
import re
from collections.abc import Mapping, Sequence, Set
from typing import Any, Final

MOST_WHOLE: Final = (1 << 63) - 1
MOST_NUMBER: Final = 1e15
# The last second of the year 9999, where the calendar of Python and of ISO 8601 ends.
LATEST_S: Final = 253_402_300_799.0
# No world has more ranks, and loops over them would not end.
MOST_RANKS: Final = 1 << 20
_MOST_NESTED: Final = 200


def parsed(data: bytes | str) -> Any:  # noqa: ANN401 -- whatever JSON held
    """The value of a JSON text.

    Raises:
        ValueError: it is not JSON, or is nested too deeply to be handled.
    """
    try:
        found = json.loads(data)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    brackets = data.count("[") + data.count("{") if isinstance(data, str) else data.count(b"[") + data.count(b"{")
    # Python versions differ in how deep they read and how deep they write: what is read must be writable again.
    if brackets > _MOST_NESTED and not _is_shallow(found):
        raise ValueError("it is nested too deeply")
    return found


def _is_shallow(value: object) -> bool:
    level = [value]
    for _ in range(_MOST_NESTED):
        level = [
            inner
            for each in level
            if isinstance(each, dict | list)
            for inner in (each.values() if isinstance(each, dict) else each)
        ]
        if not level:
            return True
    return False


def as_number(value: object) -> float | None:
    """A number that JSON held; None if it is none, is not finite or is out of range. ``true`` is none."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    # NaN compares false; a whole number of any length compares without becoming a float.
    return float(value) if -MOST_NUMBER <= value <= MOST_NUMBER else None


def as_whole(value: object) -> int | None:
    """A whole number from 0 that fits into 64 bits; None if it is none. ``true`` is none."""
    return value if type(value) is int and 0 <= value <= MOST_WHOLE else None


def are_whole(values: Sequence[object]) -> bool:
    """Whether all of a list that JSON held are whole numbers, as ``as_whole`` takes them."""
    # By type: ``true`` equals 1 and is none.
    return not values or (set(map(type, values)) == {int} and min(values) >= 0 and max(values) <= MOST_WHOLE)  # type: ignore[type-var, operator]


def as_instant(value: object) -> float | None:
    """Seconds since 1970 that a calendar has a date for; None if it is not such a number."""
    found = as_number(value)
    return found if found is not None and 0 <= found <= LATEST_S else None


class Malformed(Exception):
    """A value in a record of ours is not of its type; the reader turns it into an error with a path."""


class Table:
    """One JSON object whose members are read by type."""

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
        """Pass if it has no other members."""
        if unknown := sorted(self._values.keys() - keys):
            raise Malformed(f"{self._name} has an unknown member {unknown[0]!r}")

    def whole(self, key: str, *, below: int | None = None) -> int:
        """A whole number that is not negative and fits into 64 bits; ``true`` is not 1."""
        found = as_whole(self._get(key))
        if found is None or (below is not None and found >= below):
            raise self._wrong(key, f"a whole number below {'2^63' if below is None else below}")
        return found

    def flag(self, key: str) -> bool:
        """True or false."""
        value = self._get(key)
        if not isinstance(value, bool):
            raise self._wrong(key, "true or false")
        return value

    def number(self, key: str) -> float:
        """A number within range; neither infinity nor NaN."""
        found = as_number(self._get(key))
        if found is None:
            raise self._wrong(key, f"a number up to {MOST_NUMBER:g}")
        return found

    def instant(self, key: str) -> float:
        """Seconds since 1970, up to the end of the year 9999."""
        found = as_instant(self._get(key))
        if found is None:
            raise self._wrong(key, "an instant in seconds since 1970")
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
