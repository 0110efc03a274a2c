"""A file that a command makes, and replaces only when it is told to."""

import os
from pathlib import Path

from unbroken.errors import BadUsage, Help, PathMissing, WouldOverwrite
from unbroken.files import LOCAL
from unbroken.store.names import scratch


def write_new(command: str, target: Path, text: str, remedy: Help, *, is_replacing: bool) -> None:
    """Write a file that is not there yet, or in the place of one; ``remedy`` is what helps if it may not be replaced.

    Raises:
        BadUsage: the path is a directory.
        PathMissing: there is no directory for it.
        WouldOverwrite: it is there, and is not to be replaced.
        StorageFailed: the system refused.
    """
    if target.is_dir():
        raise BadUsage(command=command, complaint=f"-o takes a file's name; '{target}' is a directory")
    if not target.parent.is_dir():
        raise PathMissing(path=target.parent, purpose="directory")
    # The process id keeps two commands beside each other from sharing a scratch file.
    beside = scratch(f"new_{os.getpid()}", target.name)
    if is_replacing:
        LOCAL.replace(target, text.encode(), scratch=beside)
    elif not LOCAL.create_once(target, text.encode(), scratch=beside):
        raise WouldOverwrite(path=target, remedy=remedy)
