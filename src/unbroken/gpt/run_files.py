"""The trainer's files in a run's directory: config, tokenizer, and the log of each job.

``config.json`` and ``tokenizer/`` are written once, by the job that starts the run, while it holds the lease;
``accepted.json`` by each job that changes a value by ``--accept``, before its first step. ``logs/job-0005.log`` has the
log lines of one job; an I/O error there does not end the training.
"""

import contextlib
import json
import logging
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Final

from unbroken.data.corpus.listing import TokenizerIdentity
from unbroken.data.ingest.encoders import FILE_NAME, TokenizerFile
from unbroken.errors import StorageFailed
from unbroken.files import LOCAL, Appender, Files
from unbroken.launch.accepted import write_accepted
from unbroken.launch.started import Started
from unbroken.records.layout import Layout
from unbroken.store.names import scratch

TOKENIZER: Final = "tokenizer"
IDENTITY: Final = "identity.json"
LOGS: Final = "logs"


def keep_config(layout: Layout, started: Started, files: Files = LOCAL, *, job: int = 1, step: int = 0) -> None:
    """Write the config that started the run, unless it exists, and the values that this job changes.

    Raises:
        StorageFailed: an I/O error.
    """
    if started.is_recorded:
        if started.taken or started.is_rebuilt:
            write_accepted(layout, started.history(job=job, step=step), files)
        return
    if files.find(layout.accepted) is not None:
        # From an earlier run. Removed first, so that no crash leaves it next to the new config.
        write_accepted(layout, (), files)
    # crash here: no record yet, or the whole one; without a checkpoint the next job writes it again if it differs.
    files.replace(layout.config, started.config.to_json().encode(), scratch=scratch("trainer", "config"))


def keep_tokenizer(
    layout: Layout, identity: TokenizerIdentity | None, file: TokenizerFile | None, files: Files = LOCAL
) -> None:
    """Write the tokenizer's identity, and its file if there is one, unless they exist.

    Raises:
        StorageFailed: an I/O error.
    """
    folder = layout.run / TOKENIZER
    if identity is None or files.find(folder / IDENTITY) is not None:
        return
    files.make_directory(folder, durable=True)
    if file is not None and file.content is not None:
        # crash here: the file without its identity; the next job writes both.
        files.replace(folder / FILE_NAME, file.content, scratch=scratch("trainer", FILE_NAME))
    said = json.dumps(asdict(identity), indent=2) + "\n"
    # crash here: no identity yet; the next job writes it.
    files.replace(folder / IDENTITY, said.encode(), scratch=scratch("trainer", IDENTITY))


class JobLog(logging.Handler):
    """Writes the package's log lines to the job's log, inside its ``with`` block.

    Lines are buffered until ``begin`` gives the job number. A line that cannot be written is lost.
    """

    def __init__(self, files: Files = LOCAL) -> None:
        super().__init__(logging.INFO)
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(message)s"))
        self._files = files
        self._waiting: list[bytes] = []
        self._appender: Appender | None = None
        self._spoken = logging.getLogger("unbroken")
        self._level_before = logging.NOTSET

    def begin(self, run: Path, job: int) -> None:
        """Start writing, to the log of this job."""
        with contextlib.suppress(StorageFailed):
            self._files.make_directory(run / LOGS)
        self._appender = self._files.appending(run / LOGS / f"job-{job:04d}.log")
        self._write(b"".join(self._waiting))
        self._waiting.clear()

    def emit(self, record: logging.LogRecord) -> None:
        """Write or buffer one line."""
        line = f"{self.format(record)}\n".encode("utf-8", "backslashreplace")
        if self._appender is None:
            self._waiting.append(line)
        else:
            self._write(line)

    def _write(self, lines: bytes) -> None:
        with contextlib.suppress(StorageFailed):
            if self._appender is not None and lines:
                self._appender.append(lines)

    def __enter__(self) -> "JobLog":
        self._level_before = self._spoken.level
        # A run has its log even if the user set up no logging.
        self._spoken.setLevel(min(self._spoken.getEffectiveLevel(), logging.INFO))
        self._spoken.addHandler(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._spoken.removeHandler(self)
        self._spoken.setLevel(self._level_before)
        with contextlib.suppress(StorageFailed):
            if self._appender is not None:
                self._appender.close()
        self.close()
