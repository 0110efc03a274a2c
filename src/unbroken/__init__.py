"""unbroken: N short training jobs equal one long job, bit for bit.

Importing this package imports neither torch nor numpy; ``Run``, ``load`` and ``exact`` do, when they are first named.
"""

from typing import TYPE_CHECKING, Any

from unbroken.version import VERSION as __version__

if TYPE_CHECKING:
    from unbroken import exact
    from unbroken.loop.run import Run
    from unbroken.loop.settings import Settings
    from unbroken.records.checkpoints import checkpoints
    from unbroken.state.load import load

__all__ = ["Run", "Settings", "__version__", "checkpoints", "exact", "load"]


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:  # noqa: ANN401 -- whatever the name stands for
    if name == "Run":
        from unbroken.loop.run import Run

        return Run
    if name == "Settings":
        from unbroken.loop.settings import Settings

        return Settings
    if name == "checkpoints":
        from unbroken.records.checkpoints import checkpoints

        return checkpoints
    if name == "load":
        from unbroken.state.load import load

        return load
    if name == "exact":
        import importlib

        return importlib.import_module("unbroken.exact")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
