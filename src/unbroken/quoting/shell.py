"""Quoting for a shell: one printable line that the shell reads back as exactly the same word.

A word with a line break or a control character is written as ``$'...'``, which bash, zsh, ksh and POSIX 2024 read. So
a quoted word is safe in a comment and on a terminal too.
"""

import os
from collections.abc import Iterable
from pathlib import Path


def for_shell(word: str | Path) -> str:
    """One word, quoted for a shell."""
    text = str(word)
    if text.isprintable():
        # Imported here: only needed when an error is printed.
        import shlex

        return shlex.quote(text)
    return f"$'{''.join(map(_escaped, text))}'"


def shell_line(words: Iterable[str | Path]) -> str:
    """A command line that can be pasted into a shell."""
    return " ".join(map(for_shell, words))


def _escaped(character: str) -> str:
    if character in "\\'":
        return f"\\{character}"
    if character.isprintable():
        return character
    # Always three octal digits, so that a following digit is not read as part of them.
    return "".join(f"\\{byte:03o}" for byte in os.fsencode(character))
