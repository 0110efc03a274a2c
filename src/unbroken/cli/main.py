"""The tool's front door: runs one command and turns every ending into an exit code.

Owns the last line of defence: a user's mistake is told in the house's form, our bug is told as such, and a traceback
is shown only when ``UNBROKEN_TRACEBACK`` asks for one. ``--version`` is answered before click is loaded.
"""

import contextlib
import io
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, TextIO

from unbroken.version import VERSION

if TYPE_CHECKING:
    from click import ClickException

    from unbroken.errors import UnbrokenError

EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141
COMPLETE_VARIABLE = "_UNBROKEN_COMPLETE"
# The packages of the extra `train`: a base install has none of them.
TRAIN_PACKAGES = frozenset({"numpy", "pyarrow", "tokenizers", "torch", "zstandard"})


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool on these arguments, the process's own by default; returns the exit code."""
    args = list(sys.argv[1:] if argv is None else argv)
    _make_streams_safe()
    try:
        return _version() if args == ["--version"] else _run(args)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        _close(sys.stdout, sys.stderr)
        return EXIT_BROKEN_PIPE
    except OSError as refusal:
        # Standard output takes nothing, not even the error: what is left is standard error.
        return _told_beside(refusal)


def _version() -> int:
    sys.stdout.write(f"unbroken {VERSION}\n")
    sys.stdout.flush()
    return 0


def _close(*streams: TextIO) -> None:
    # Closing meets the refusal once more, here and not in the interpreter's last breath, where it would be printed.
    for stream in streams:
        with contextlib.suppress(OSError):
            stream.close()


def _told_beside(refusal: OSError) -> int:
    from pathlib import Path

    from unbroken.cli.output import Output
    from unbroken.errors import StorageFailed, UnbrokenError

    error: UnbrokenError = StorageFailed(
        operation="write", path=Path("standard output"), cause=refusal.strerror or str(refusal)
    )
    if isinstance(refusal, UnbrokenError):
        error = refusal
    _close(sys.stdout)
    with contextlib.suppress(OSError):
        Output(json=False, quiet=False, stdout=sys.stderr, stderr=sys.stderr, environ=os.environ).error(error)
    return error.exit_code


def _make_streams_safe() -> None:
    # A file name that is no UTF-8, or a terminal that is not, must not turn a message into a crash.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    # Closed by the one who called us (`>&-`): say it to nobody.
    sys.stdout = sys.stdout or io.StringIO()
    sys.stderr = sys.stderr or io.StringIO()


def _run(args: list[str]) -> int:
    from click import ClickException
    from click.exceptions import Exit

    from unbroken.cli.group import PROGRAM, ROOT
    from unbroken.errors import UnbrokenError

    if instruction := os.environ.get(COMPLETE_VARIABLE):
        from click.shell_completion import shell_complete

        return shell_complete(ROOT, {}, PROGRAM, COMPLETE_VARIABLE, instruction)
    try:
        with ROOT.make_context(PROGRAM, list(args)) as ctx:
            return ROOT.invoke(ctx) or 0
    except Exit as ending:
        return ending.exit_code
    except UnbrokenError as error:
        return _told(error, args)
    except ClickException as complaint:
        return _told(_as_bad_usage(complaint), args)
    except BrokenPipeError:
        raise
    except Exception as surprise:  # noqa: BLE001 -- the one place where anything unexpected becomes our bug
        return _told(_as_missing(surprise, args) or _as_bug(surprise), args)


def _told(error: "UnbrokenError", args: list[str]) -> int:
    from unbroken.cli.output import Output

    if os.environ.get("UNBROKEN_TRACEBACK"):
        import traceback

        from unbroken.quoting.terminal import for_terminal

        sys.stderr.write(for_terminal("".join(traceback.format_exception(error))))
    options = args[: args.index("--")] if "--" in args else args
    output = Output(json="--json" in options, quiet=False, stdout=sys.stdout, stderr=sys.stderr, environ=os.environ)
    output.error(error)
    return error.exit_code


def _as_missing(surprise: Exception, args: list[str]) -> "UnbrokenError | None":
    """The error for a base install in which a command needs more; None where it is something else."""
    package = (surprise.name or "").partition(".")[0] if isinstance(surprise, ModuleNotFoundError) else ""
    if package not in TRAIN_PACKAGES:
        return None
    from unbroken.errors import PackageMissing, TorchMissing

    name = next((word for word in args if not word.startswith("-")), "")
    purpose = f"unbroken {name}".strip()
    if package == "torch":
        return TorchMissing(purpose=purpose)
    return PackageMissing(package=package, purpose=purpose)


def _as_bug(surprise: Exception) -> "UnbrokenError":
    from unbroken.errors import Bug

    said = " ".join(str(surprise).split())
    bug = Bug(cause=f"{type(surprise).__name__}: {said}" if said else type(surprise).__name__)
    bug.__cause__ = surprise
    return bug


def _as_bad_usage(complaint: "ClickException") -> "UnbrokenError":
    from unbroken.cli.group import as_bad_usage

    return as_bad_usage(complaint)


if __name__ == "__main__":
    sys.exit(main())
