"""N short training jobs equal one long job, bit for bit.

``import unbroken`` is enough: ``unbroken.exact``, ``unbroken.data``, ``unbroken.gpt``, ``unbroken.testing``,
``unbroken.config`` and ``unbroken.errors`` are imported when they are first used. Until then neither torch nor numpy
is imported. A framework's module is imported by its name: ``from unbroken.frameworks import accelerate``.
"""

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any, Final

from unbroken.version import SUPPORTED
from unbroken.version import VERSION as __version__

if TYPE_CHECKING:
    from unbroken import config, data, errors, exact, frameworks, gpt, testing
    from unbroken.foreign.load import load
    from unbroken.loop.run import Run
    from unbroken.loop.settings import Settings
    from unbroken.records.checkpoints import Checkpoint, checkpoints
    from unbroken.state.load import Loaded
    from unbroken.state.planners import BalanceBytes, BalanceTime, SavePlanner

__all__ = [
    "BalanceBytes",
    "BalanceTime",
    "Checkpoint",
    "Loaded",
    "Run",
    "SavePlanner",
    "Settings",
    "__version__",
    "checkpoints",
    "config",
    "data",
    "errors",
    "exact",
    "frameworks",
    "gpt",
    "load",
    "testing",
]

_PACKAGES: Final = ("config", "data", "errors", "exact", "frameworks", "gpt", "testing")
_HOMES: Final = {
    "BalanceBytes": "unbroken.state.planners",
    "BalanceTime": "unbroken.state.planners",
    "SavePlanner": "unbroken.state.planners",
    "Checkpoint": "unbroken.records.checkpoints",
    "Loaded": "unbroken.state.load",
    "Run": "unbroken.loop.run",
    "Settings": "unbroken.loop.settings",
    "checkpoints": "unbroken.records.checkpoints",
    "load": "unbroken.foreign.load",
}

if os.environ.get("UNBROKEN_OUTCOME_FILE"):
    importlib.import_module("unbroken.launch.uncaught").report_uncaught()


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:  # noqa: ANN401 -- any public name
    if sys.platform != SUPPORTED and name in __all__ and name != "errors":
        from unbroken.errors import PlatformUnsupported

        raise PlatformUnsupported(platform=sys.platform)
    if name in _PACKAGES:
        return importlib.import_module(f"{__name__}.{name}")
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
