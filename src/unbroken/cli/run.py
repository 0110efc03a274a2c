"""``unbroken run``: a parent for a training script or torchrun that passes signals on and owns the exit code."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from unbroken.cli.launch_options import LaunchArguments, launch_options, launched, script_arguments
from unbroken.cli.output import Output, as_command
from unbroken.launch.command import require_target, target_of
from unbroken.records.layout import require_directory

PROGRAM: Final = "unbroken run"


@as_command("run", context_settings={"allow_interspersed_args": False})
@launch_options(PROGRAM)
@script_arguments
def command(
    output: Output, asked: LaunchArguments, run_dir: Path | None, module: str | None, words: tuple[str, ...]
) -> int:
    """Start a training script, pass signals on, own its exit code."""
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
    """Start what the words name, once or until its run is done; returns the exit code.

    Raises:
        BadUsage: nothing is named, or no script.
        PathMissing: there is no such script.
        ModuleMissing: there is no such module.
        BadRunPath: the run's directory is a path at which no run can be.
        NotAStore: there is a file where the run's directory is to be.
        TorchMissing: several processes were asked for and there is no torch.
    """
    target = target_of(program, module, words)
    require_target(program, target, Path.cwd())
    if run_dir is not None:
        require_directory(run_dir)
    schema = f"{program.replace(' ', '.')}/1"
    return launched(output, program, schema, asked.options(target, run=run_dir, until_done=until_done))
