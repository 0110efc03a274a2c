"""Words as a shell takes them: one line, printable, and exactly the word that was given.

A word with a line break or a control character is written as ``$'...'``, which bash, zsh, ksh and POSIX 2024 read: it
stays one line of a script and steers no terminal. So a quoted word can also stand in a comment.
"""

import os
from collections.abc import Iterable
from pathlib import Path


def for_shell(word: str | Path) -> str:
    """One word as a shell takes it."""
    text = str(word)
    if text.isprintable():
        # Imported here: help lines are made only when an error is being shown.
        import shlex

        return shlex.quote(text)
    return f"$'{''.join(map(_escaped, text))}'"


def shell_line(words: Iterable[str | Path]) -> str:
    """A command as it can be pasted, on one line."""
    return " ".join(map(for_shell, words))


def _escaped(character: str) -> str:
    if character in "\\'":
        return f"\\{character}"
    if character.isprintable():
        return character
    # Always three octal digits, so that a digit behind them is not taken for one of theirs.
    return "".join(f"\\{byte:03o}" for byte in os.fsencode(character))
