"""How long a test waits for something that must happen: far longer than the busiest machine needs.

Only a hang lasts this long. Tests never assert that something was quick, so a longer wait costs nothing
when all is well; pytest's own limit (pyproject.toml) lies above it and shows where every thread stands.
A mutation may well cause a hang: `tests/mutation` sets a shorter time for its tests.
"""

import os
from typing import Final

# The worlds of unbroken.testing take their limit from the same variable.
PATIENCE_S: Final = float(os.environ.setdefault("UNBROKEN_TEST_TIMEOUT_S", "480"))
