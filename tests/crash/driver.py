"""One scene's action as a process of its own: ``python -m tests.crash.driver TITLE STORE [FORGOTTEN]``.

It says ``reached`` when the result must survive everything, and ends with the exit code of the error it meets.
``FORGOTTEN`` names a kind of sync that is left out, to show that a test would notice.
"""

import sys
from pathlib import Path

from tests.crash.scenes import SCENES
from unbroken.disk import LocalDisk
from unbroken.errors import UnbrokenError, render
from unbroken.files import Files
from unbroken.store.directory import Store
from unbroken.testing import FaultyDisk, Ignore, always


def main(title: str, root: str, forgotten: str = "none") -> int:
    """Act; returns the exit code."""
    scene = next(scene for scene in SCENES if scene.title == title)
    files = Files(FaultyDisk(LocalDisk(), always(forgotten, Ignore())))
    try:
        scene.act(Store(Path(root), files), lambda: print("reached", flush=True))
    except UnbrokenError as refused:
        print(render(refused), file=sys.stderr)
        return refused.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
