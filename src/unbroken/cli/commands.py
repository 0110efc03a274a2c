"""The commands as data: name, where each one lives, its line in the help, its heading.

To add a command, add one line here. Listing, suggestions and completion of names read this table and load nothing.
"""

from typing import Final, NamedTuple


class Entry(NamedTuple):
    """One command; ``place`` is ``module:attribute``, loaded when the command is called."""

    place: str
    help: str
    heading: str


CONFIG: Final = "Config"
CHECKPOINTS: Final = "Checkpoints"
DATA: Final = "Data"
RUNS: Final = "Runs"
TOOL: Final = "The tool itself"

COMMANDS: Final[dict[str, Entry]] = {
    "init": Entry("unbroken.cli.init:command", "Write a commented config to start from.", CONFIG),
    "validate": Entry("unbroken.cli.validate:command", "Check a config and name every problem in it.", CONFIG),
    "tokenize": Entry(
        "unbroken.cli.tokenize:command", "Tokenize text into shards; killed, the same command goes on.", DATA
    ),
    "tokenizer": Entry("unbroken.cli.tokenizer:command", "Make a tokenizer of your own text.", DATA),
    "data": Entry("unbroken.cli.data:command", "Look at tokenized data: what it holds, sample by sample.", DATA),
    "train": Entry("unbroken.cli.train:command", "Start a run, or go on with it: the same command does both.", RUNS),
    "evaluate": Entry("unbroken.cli.evaluate:command", "Measure a checkpoint's loss on val/.", RUNS),
    "generate": Entry("unbroken.cli.generate:command", "Continue a prompt with a run's model.", RUNS),
    "batch-generate": Entry("unbroken.cli.batch_generate:command", "Continue the prompts of a file.", RUNS),
    "export": Entry("unbroken.cli.export:command", "Write a checkpoint's weights for other programs.", RUNS),
    "run": Entry("unbroken.cli.run:command", "Start a training script, pass signals on, own its exit code.", RUNS),
    "prove": Entry("unbroken.cli.prove:command", "Break your own training on purpose; compare every bit.", RUNS),
    "launch": Entry("unbroken.cli.launch:command", "Start a script, job after job, until its run is done.", RUNS),
    "status": Entry("unbroken.cli.status:command", "Show how a run stands.", RUNS),
    "stop": Entry("unbroken.cli.stop:command", "Ask the job of a run to save and end, or kill it.", RUNS),
    "release": Entry(
        "unbroken.cli.release:command", "Release a run whose job is gone, after watching its lease.", RUNS
    ),
    "plan": Entry("unbroken.cli.plan:command", "Say how often to save, and when a run will be done.", RUNS),
    "outcome": Entry("unbroken.cli.outcome:command", "Tell how the last job of a run ended.", RUNS),
    "kubernetes": Entry("unbroken.cli.kubernetes:command", "Print a Kubernetes manifest for a run.", RUNS),
    "slurm": Entry("unbroken.cli.slurm:command", "Jobs of SLURM that go on by themselves.", RUNS),
    "ls": Entry("unbroken.cli.ls:command", "List the checkpoints of a run.", CHECKPOINTS),
    "show": Entry("unbroken.cli.show:command", "Show the manifest of one checkpoint.", CHECKPOINTS),
    "verify": Entry("unbroken.cli.verify:command", "Verify one checkpoint, or every checkpoint of a run.", CHECKPOINTS),
    "diff": Entry("unbroken.cli.diff:command", "Say which tensors of two checkpoints differ.", CHECKPOINTS),
    "replay": Entry(
        "unbroken.cli.replay:command", "Recompute from one checkpoint to another; compare every bit.", CHECKPOINTS
    ),
    "prune": Entry(
        "unbroken.cli.prune:command", "Remove checkpoints that no policy keeps, and leftovers.", CHECKPOINTS
    ),
    "pin": Entry("unbroken.cli.pin:pin", "Keep a checkpoint whatever the policies say.", CHECKPOINTS),
    "unpin": Entry("unbroken.cli.pin:unpin", "Take a pin back.", CHECKPOINTS),
    "seal": Entry("unbroken.cli.seal:command", "Add a manifest to a folder.", CHECKPOINTS),
    "demo": Entry("unbroken.cli.demo:command", "See a run survive being killed, bit for bit.", TOOL),
    "explain": Entry("unbroken.cli.explain:command", "Explain an error, a config field or a section.", TOOL),
    "completion": Entry("unbroken.cli.completion:command", "Print a completion script for your shell.", TOOL),
}
