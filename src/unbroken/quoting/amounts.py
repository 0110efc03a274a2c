"""Counts, sizes and durations as text."""

from collections.abc import Sequence

_SIZE_UNITS = ("bytes", "kB", "MB", "GB", "TB", "PB")


def count(number: int) -> str:
    """An integer with thousands separators: ``24,750``."""
    return f"{number:,}"


def plural(number: int, noun: str, nouns: str | None = None) -> str:
    """A count with its noun: ``1 part``, ``3 parts``; ``nouns`` is a plural that is not made by an s."""
    return f"{count(number)} {noun if number == 1 else nouns or f'{noun}s'}"


def listed(names: Sequence[str], most: int) -> str:
    """The first names of what may be a long list: ``a, b, c and 1,203 more``."""
    more = f" and {count(len(names) - most)} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def size(number_bytes: int) -> str:
    """A size in decimal units, as ``df -H`` prints it: ``6.1 GB``."""
    value = float(number_bytes)
    for unit in _SIZE_UNITS:
        # 999.95 would print as 1000.0: use the next unit from there.
        if abs(value) < 999.95 or unit == _SIZE_UNITS[-1]:
            break
        value /= 1000
    return f"{number_bytes} {unit}" if unit == "bytes" else f"{value:.1f} {unit}"


def duration(seconds: float) -> str:
    """A duration with its two largest units: ``25 h 10 min``, ``4 min``, ``0.4 s``."""
    if seconds < 0:
        return f"-{duration(-seconds)}"
    # 9.95 would print as 10.0: whole seconds from there.
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    # Below two days, hours are easier to read.
    days, rest = divmod(whole, 86_400) if whole >= 2 * 86_400 else (0, whole)
    hours, rest = divmod(rest, 3_600)
    minutes, secs = divmod(rest, 60)
    units = [(days, "d"), (hours, "h"), (minutes, "min"), (secs, "s")]
    first = next(i for i, (amount, _) in enumerate(units) if amount)
    return " ".join(f"{amount} {unit}" for amount, unit in units[first : first + 2] if amount)


def ago(seconds: float) -> str:
    """How long ago, in one unit: ``4 min ago``, ``13 h ago``; ``just now`` for less than a second or the future."""
    for limit, unit in ((86_400 * 2, "d"), (3_600, "h"), (60, "min"), (1, "s")):
        if seconds >= limit:
            per_unit = {"d": 86_400, "h": 3_600, "min": 60, "s": 1}[unit]
            return f"{int(seconds // per_unit)} {unit} ago"
    return "just now"
