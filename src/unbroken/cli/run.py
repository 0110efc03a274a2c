"""``unbroken run``: runs a training script, forwards signals to it and exits with its outcome."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from unbroken.cli.launch_options import LaunchArguments, launch_options, launched, script_arguments
from unbroken.cli.output import Output, as_command
from unbroken.launch.command import require_target, target_of
from unbroken.records.layout import require_directory

PROGRAM: Final = "unbroken run"


EXIT_CODES: Final = {
    0: "target reached, or stopped cleanly (see --stopped-exit-code)",
    2: "the command is wrong, or the script rejected its arguments",
    7: "another job holds the run",
    74: "storage failed; the last checkpoint is intact",
}


@as_command(
    "run",
    examples=(
        ("unbroken run -- train.py --lr 3e-4", "one process"),
        ("unbroken run --nproc-per-node 8 -- train.py", "8 processes under torchrun"),
        ("unbroken run --max-restarts 3 -- train.py", "restart after a crash"),
    ),
    exit_codes=EXIT_CODES,
    context_settings={"allow_interspersed_args": False},
)
@launch_options(PROGRAM)
@script_arguments
def command(
    output: Output, asked: LaunchArguments, run_dir: Path | None, module: str | None, words: tuple[str, ...]
) -> int:
    """Run a training script and forward signals to it.

    SCRIPT is a Python script whose loop is an unbroken.Run. A signal makes it save and exit. Unlike torchrun, the exit
    code tells how the run ended; `unbroken explain exit-codes` lists all codes.
    """
    return launch_script(output, PROGRAM, asked, run_dir, module, words)


def launch_script(
    output: Output,
    program: str,
    asked: LaunchArguments,
    run_dir: Path | None,
    module: str | None,
    words: Sequence[str],
    *,
    until_done: bool = False,
) -> int:
    """Run a script or module, once or until its run is done; returns the exit code.

    Raises:
        BadUsage: no script is given, or it is not one.
        PathMissing: the script does not exist.
        ModuleMissing: the module does not exist.
        BadRunPath: no run can be at the path of the run directory.
        NotAStore: the run directory is a file.
        TorchMissing: several processes need torch, which is not installed.
    """
    target = target_of(program, module, words)
    require_target(program, target, Path.cwd())
    if run_dir is not None:
        require_directory(run_dir)
    schema = f"{program.replace(' ', '.')}/1"
    return launched(output, program, schema, asked.options(target, run=run_dir, until_done=until_done))
