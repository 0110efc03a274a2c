"""``unbroken launch``: the same as ``run``, job after job, until the run is done or a person must look."""

from pathlib import Path
from typing import Final

from unbroken.cli.launch_options import LaunchArguments, launch_options, script_arguments
from unbroken.cli.output import Output, as_command
from unbroken.cli.run import launch_script

PROGRAM: Final = "unbroken launch"


@as_command("launch", context_settings={"allow_interspersed_args": False})
@launch_options(PROGRAM)
@script_arguments
def command(
    output: Output, asked: LaunchArguments, run_dir: Path | None, module: str | None, words: tuple[str, ...]
) -> int:
    """Start a script, job after job, until its run is done.

    Goes on after a crash, a kill and a job whose time was over; not after a signal or unbroken stop, nor where a
    person must look, nor after three restarts that brought the run no further.
    """
    return launch_script(output, PROGRAM, asked, run_dir, module, words, until_done=True)
