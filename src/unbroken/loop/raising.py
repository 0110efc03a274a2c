"""Why the iterator of a loop is closed: the loop was left by ``break``, or by an exception."""

import dis
import gc
import inspect
from types import FrameType, TracebackType
from typing import Final

_AT_YIELD: Final = frozenset({"YIELD_VALUE", "RESUME"})


def is_raising(frame: FrameType | None) -> bool:
    """Whether an exception is on its way up through a frame.

    A loop that is left by ``break`` and one that is left by an exception close their iterator alike, and Python shows
    the exception to neither. But its traceback has an entry for this frame at this very instruction. A generator around
    the loop that is closed is itself at its ``yield``: then its own caller decides.
    """
    while frame is not None:
        if not any(
            isinstance(each, TracebackType) and each.tb_frame is frame and each.tb_lasti == frame.f_lasti
            for each in gc.get_referrers(frame)
        ):
            return False
        code = frame.f_code
        if not code.co_flags & inspect.CO_GENERATOR or dis.opname[code.co_code[frame.f_lasti]] not in _AT_YIELD:
            return True
        frame = frame.f_back
    return False
