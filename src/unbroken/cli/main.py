"""Entry point of ``unbroken``: runs one command and turns however it ends into an exit code.

Errors are printed in one form, unexpected exceptions as a bug of ours; a traceback only with ``UNBROKEN_TRACEBACK=1``.
``--version`` is answered before click is imported.
"""

import contextlib
import io
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, TextIO

from unbroken.version import SUPPORTED, VERSION

if TYPE_CHECKING:
    from click import ClickException

    from unbroken.errors import UnbrokenError

EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141
COMPLETE_VARIABLE = "_UNBROKEN_COMPLETE"
# Packages of the extra `train`, which a base install lacks.
TRAIN_PACKAGES = frozenset({"numpy", "pyarrow", "tokenizers", "torch", "zstandard"})


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``unbroken`` with these arguments, ``sys.argv`` by default; returns the exit code."""
    args = list(sys.argv[1:] if argv is None else argv)
    _make_streams_safe()
    try:
        if args == ["--version"]:
            return _version()
        return _run(args) if sys.platform == SUPPORTED else _refuse_platform(args)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        _close(sys.stdout, sys.stderr)
        return EXIT_BROKEN_PIPE
    except OSError as failure:
        # Standard output cannot be written, so the error goes to standard error even with --json.
        return _print_on_stderr(failure)


def _version() -> int:
    sys.stdout.write(f"unbroken {VERSION}\n")
    sys.stdout.flush()
    return 0


def _refuse_platform(args: list[str]) -> int:
    # Without click and rich: what they need may be missing here too.
    import json

    from unbroken.errors import PlatformUnsupported, as_json, render
    from unbroken.quoting.terminal import for_terminal

    error = PlatformUnsupported(platform=sys.platform)
    if "--json" in args:
        sys.stdout.write(for_terminal(f"{json.dumps(as_json(error))}\n"))
    else:
        sys.stderr.write(for_terminal(f"{render(error)}\n"))
    return error.exit_code


def _close(*streams: TextIO) -> None:
    # Closing fails once more: here, and not at interpreter shutdown, which would print a traceback.
    for stream in streams:
        with contextlib.suppress(OSError):
            stream.close()


def _print_on_stderr(failure: OSError) -> int:
    from pathlib import Path

    from unbroken.cli.output import Output
    from unbroken.errors import StorageFailed, UnbrokenError

    error: UnbrokenError = StorageFailed(
        operation="write", path=Path("standard output"), cause=failure.strerror or str(failure)
    )
    if isinstance(failure, UnbrokenError):
        error = failure
    _close(sys.stdout)
    with contextlib.suppress(OSError):
        Output(json=False, quiet=False, stdout=sys.stderr, stderr=sys.stderr, environ=os.environ).error(error)
    return error.exit_code


def _make_streams_safe() -> None:
    # A file name or a terminal that is not UTF-8 must not turn a message into a crash.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    # None where the caller closed them (`>&-`).
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
    except Exit as leaving:
        return leaving.exit_code
    except UnbrokenError as error:
        return _print_error(error, args)
    except ClickException as complaint:
        return _print_error(_as_bad_usage(complaint), args)
    except BrokenPipeError:
        raise
    except Exception as surprise:  # noqa: BLE001 -- the one place where anything unexpected becomes our bug
        return _print_error(_as_missing(surprise, args) or _as_bug(surprise), args)


def _print_error(error: "UnbrokenError", args: list[str]) -> int:
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
    """The error for a package of the extra `train` that is not installed; None for any other exception."""
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

    message = " ".join(str(surprise).split())
    bug = Bug(cause=f"{type(surprise).__name__}: {message}" if message else type(surprise).__name__)
    bug.__cause__ = surprise
    return bug


def _as_bad_usage(complaint: "ClickException") -> "UnbrokenError":
    from unbroken.cli.group import as_bad_usage

    return as_bad_usage(complaint)


if __name__ == "__main__":
    sys.exit(main())
