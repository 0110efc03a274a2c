"""``python -m unbroken`` is the ``unbroken`` command."""

import sys

from unbroken.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
