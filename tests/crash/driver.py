"""One scene's action as a process of its own: ``python -m tests.crash.driver TITLE STORE``.

It says ``reached`` when the result must survive everything, and ends with the exit code of the error it meets.
"""

import sys
from pathlib import Path

from tests.crash.scenes import SCENES
from unbroken.errors import UnbrokenError, render
from unbroken.store.place import Store


def main(title: str, root: str) -> int:
    """Act; returns the exit code."""
    scene = next(scene for scene in SCENES if scene.title == title)
    try:
        scene.act(Store(Path(root)), lambda: print("reached", flush=True))
    except UnbrokenError as refused:
        print(render(refused), file=sys.stderr)
        return refused.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
