"""Trainings that an exception left without telling the run: the records must say that they ended, and by what.

A loop without ``with``, and the Trainer of Transformers, have no event for an exception. Their run is still held when
the same process opens it again, as in a notebook, or exits.
"""

import sys
from collections.abc import Callable
from types import TracebackType


class TrainingLeft(RuntimeError):
    """An exception that the script has caught, or ``sys.exit``: nobody can say which."""

    def __init__(self, step: int, also: str) -> None:
        super().__init__(f"an exception or sys.exit left the training at step {step:,}{also}")


def what_left(step: int, *, is_through: Callable[[str], bool] = lambda _: True, also: str = "") -> BaseException:
    """The exception that has left a training: the one that is being handled, or the last one that nobody caught.

    Args:
        step: the last complete step.
        is_through: whether a module, by its name, is one that the exception must have passed.
        also: what else may have happened, for the message.
    """
    for error in (sys.exc_info()[1], getattr(sys, "last_value", None)):
        if isinstance(error, BaseException) and any(map(is_through, _modules(error.__traceback__))):
            return error
    return TrainingLeft(step, also)


def _modules(trace: TracebackType | None) -> list[str]:
    found = []
    while trace is not None:
        found.append(str(trace.tb_frame.f_globals.get("__name__", "")))
        trace = trace.tb_next
    return found
