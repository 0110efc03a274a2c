"""``python -m unbroken.gpt CONFIG [OVERRIDE]...``: one rank of a job, as ``unbroken train`` and torchrun start it.

Prints the trainer's lines on standard output and errors on standard error, and reports its outcome to the launcher if
no run could: torchrun turns every exit code into 1. With ``--json`` standard output has only events, one JSON object
per line, and everything else goes to standard error.
"""

import argparse
import contextlib
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from unbroken.config.overrides import take_apart
from unbroken.config.reading import load
from unbroken.errors import RankFailed, UnbrokenError
from unbroken.launch.run_config import taken_over
from unbroken.launch.start_clock import IMPORTS, StartClock
from unbroken.loop.recorder import SilentRecorder, report_refusal_to_launcher
from unbroken.quoting.log import is_quiet_by_environment
from unbroken.quoting.terminal import for_terminal
from unbroken.records.event_lines import EventLines
from unbroken.records.outcome import EXIT_INTERRUPTED, conclude
from unbroken.report.error import print_error


def main(argv: Sequence[str] | None = None) -> int:
    """Run one rank; returns its exit code."""
    clock = StartClock.of_process(os.environ)
    parser = argparse.ArgumentParser(prog="python -m unbroken.gpt", allow_abbrev=False)
    parser.add_argument("--config", help="the config, where it is not the first argument")
    parser.add_argument("--accept", action="append", default=[], metavar="NAME")
    parser.add_argument("--force", action="store_true")
    parser.add_argument("-q", "--quiet", action="store_true")
    parser.add_argument("-v", "--verbose", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--launched", action="store_true", help="the config is in the environment")
    options, words = parser.parse_known_args(argv)
    rank = int(os.environ.get("RANK", "0"))
    if options.json:
        _speak_json(rank)
    _speak(rank, is_quiet=options.quiet or is_quiet_by_environment(), is_verbose=options.verbose)
    output_dir: Path | None = None
    try:
        taken = take_apart(words)
        paths = [*([options.config] if options.config else []), *taken.rest]
        if unknown := [path for path in paths if path.startswith("-")]:
            parser.error(f"there is no option {' '.join(unknown)}")
        if len(paths) != 1:
            parser.error(f"one config is needed, not {len(paths)}: {' '.join(paths)}")
        resolved = taken_over(os.environ) if options.launched else load(Path(paths[0]), taken.written)
        output_dir = Path(resolved.config.training.output_dir)
        # Imported here: a config with problems is reported without waiting for torch.
        from unbroken.gpt.train import run_job

        clock.done(IMPORTS)
        run_job(resolved.config, clock, accept=options.accept, force=options.force)
    except UnbrokenError as refused:
        return _report_error(refused, rank, output_dir)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return 0


def _speak_json(rank: int) -> None:
    """Reserve standard output for events; other output goes to standard error."""
    events = os.dup(1)
    os.dup2(2, 1)
    if rank == 0:
        logging.getLogger("unbroken").addHandler(EventLines(os.fdopen(events, "w", encoding="utf-8")))


def _speak(rank: int, *, is_quiet: bool, is_verbose: bool) -> None:
    """Show the package's log on the terminal: all lines of rank 0, errors of the others."""
    handler = _Lines(sys.stdout)
    handler.setFormatter(_Line("%(message)s" if rank == 0 else f"rank {rank}: %(message)s"))
    level = logging.ERROR if rank else logging.WARNING if is_quiet else logging.INFO
    handler.setLevel(logging.DEBUG if is_verbose else level)
    spoken = logging.getLogger("unbroken")
    spoken.setLevel(logging.DEBUG if is_verbose else logging.INFO)
    spoken.addHandler(handler)


class _Lines(logging.StreamHandler[TextIO]):
    """Log lines on a stream; if its reader goes away (``| head``), one warning is printed and training continues."""

    _is_gone = False

    def emit(self, record: logging.LogRecord) -> None:
        """Write one line, unless the stream was lost."""
        if not self._is_gone:
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 -- logging's own name
        """Drop the stream if it cannot be written to; any other error is a bug and is shown."""
        lost = sys.exc_info()[1]
        if not isinstance(lost, OSError):
            super().handleError(record)
            return
        self._is_gone = True
        # Buffered output would be written again, and fail again, at interpreter exit.
        with contextlib.suppress(OSError), Path(os.devnull).open("wb") as nowhere:
            os.dup2(nowhere.fileno(), self.stream.fileno())
        with contextlib.suppress(OSError):
            warning = f"standard output cannot be written to any more ({lost.strerror}); training continues"
            sys.stderr.write(for_terminal(f"warning: {warning}, and its lines are in the run's logs/\n"))
            sys.stderr.flush()


class _Line(logging.Formatter):
    """Plain lines; warnings and errors are prefixed with their level."""

    def format(self, record: logging.LogRecord) -> str:
        # A traceback is formatted after the filter that escapes messages for a terminal.
        said = for_terminal(super().format(record))
        return said if record.levelno < logging.WARNING else f"{record.levelname.lower()}: {said}"


def _report_error(refused: UnbrokenError, rank: int, run: Path | None) -> int:
    cause = refused.cause if isinstance(refused, RankFailed) else refused
    if rank == 0 or not isinstance(refused, RankFailed):
        print_error(refused, sys.stderr, os.environ)
    outcome = conclude(refused)
    if rank == 0 and run is not None:
        report_refusal_to_launcher(run, outcome)
    else:
        # torchrun ends all ranks when one has ended: rank 0 must have reported its outcome by then.
        SilentRecorder().end(outcome)
    return cause.exit_code


if __name__ == "__main__":
    sys.exit(main())
