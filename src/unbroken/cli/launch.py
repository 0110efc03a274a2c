"""``unbroken launch``: the same as ``run``, restarting until the run is done or needs attention."""

from pathlib import Path
from typing import Final

from unbroken.cli.launch_options import LaunchArguments, launch_options, script_arguments
from unbroken.cli.output import Output, as_command
from unbroken.cli.run import EXIT_CODES, launch_script

PROGRAM: Final = "unbroken launch"


@as_command(
    "launch",
    examples=(
        ("unbroken launch -- train.py", "until the target is reached"),
        ("unbroken launch --nproc-per-node 8 --max-restarts 20 -- train.py", "with a limit"),
    ),
    exit_codes=EXIT_CODES,
    context_settings={"allow_interspersed_args": False},
)
@launch_options(PROGRAM)
@script_arguments
def command(
    output: Output, asked: LaunchArguments, run_dir: Path | None, module: str | None, words: tuple[str, ...]
) -> int:
    """Run a training script, restarting it until it is done.

    Restarts after a crash, a kill and a walltime limit. Stops after a signal, after `unbroken stop`, after an error
    that needs your attention (class `look` of `unbroken outcome`), and after 3 restarts without progress.
    """
    return launch_script(output, PROGRAM, asked, run_dir, module, words, until_done=True)
