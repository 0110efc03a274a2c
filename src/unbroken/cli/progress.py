"""The progress bar, drawn with rich; imported only when a bar is drawn."""

import contextlib
from collections.abc import Callable, Iterator
from typing import TextIO

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from unbroken.quoting.terminal import printable


@contextlib.contextmanager
def bar(title: str, total: int, *, is_bytes: bool, stream: TextIO) -> Iterator[Callable[[int], None]]:
    """Draw a bar while the block runs; it is erased when the block ends."""
    amounts: list[ProgressColumn] = [DownloadColumn(), TransferSpeedColumn()] if is_bytes else [MofNCompleteColumn()]
    columns = [TextColumn("{task.description}", markup=False), BarColumn(), *amounts, TimeRemainingColumn()]
    with Progress(*columns, console=Console(file=stream), transient=True) as progress:
        task = progress.add_task(printable(title), total=total)
        yield lambda amount: progress.advance(task, amount)
