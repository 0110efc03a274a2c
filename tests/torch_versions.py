"""Which torch the tests run with: a few prove what some versions do not have, and say so."""

import torch

from unbroken import torch_private
from unbroken.errors import TorchTooOld


def torch_is_older(major: int, minor: int) -> bool:
    """Whether this torch is older than a version; a development version counts as the one it leads to."""
    found = torch.__version__.split(".")
    return (int(found[0]), int(found[1])) < (major, minor)


def _why_no_sharded_sum() -> str | None:
    try:
        torch_private.require_custom_reduce_scatter()
    except TorchTooOld as old:
        return old.headline()
    return None


NO_SHARDED_SUM = _why_no_sharded_sum()
