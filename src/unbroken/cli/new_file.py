"""A file that a command makes and never replaces."""

import os
from pathlib import Path

from unbroken.errors import BadUsage, Help, PathMissing, WouldOverwrite
from unbroken.files import LOCAL


def write_new(command: str, target: Path, text: str, remedy: Help) -> None:
    """Write a file that is not there yet; ``remedy`` is what helps if it is.

    Raises:
        BadUsage: the path is a directory.
        PathMissing: there is no directory for it.
        WouldOverwrite: it is there.
        StorageFailed: the system refused.
    """
    if target.is_dir():
        raise BadUsage(command=command, complaint=f"-o takes a file's name; '{target}' is a directory")
    if not target.parent.is_dir():
        raise PathMissing(path=target.parent, purpose="directory")
    # The process id keeps two commands beside each other from sharing a scratch file.
    if not LOCAL.create_once(target, text.encode(), scratch=f".{target.name}.{os.getpid()}.tmp"):
        raise WouldOverwrite(path=target, remedy=remedy)
