"""The table of commands: name, import path, one-line summary and heading of each.

To add a command, add one line here. Listing, suggestions and completion of names read this table and import nothing.
"""

from typing import Final, NamedTuple


class Entry(NamedTuple):
    """One command; ``target`` is ``module:attribute``, imported when the command is called."""

    target: str
    help: str
    heading: str


START: Final = "Get started"
DATA: Final = "Prepare data"
TRAIN: Final = "Train"
CONTROL: Final = "Monitor and control"
CHECKPOINTS: Final = "Manage checkpoints"
MODEL: Final = "Use the model"
EXACT: Final = "Prove exactness"
HELP: Final = "Get help"

COMMANDS: Final[dict[str, Entry]] = {
    "demo": Entry("unbroken.cli.demo:command", "Train a tiny GPT, kill it, resume it, compare every bit.", START),
    "init": Entry("unbroken.cli.init:command", "Write a commented config file.", START),
    "validate": Entry("unbroken.cli.validate:command", "Check a config, its data, memory and walltime.", START),
    "doctor": Entry("unbroken.cli.doctor:command", "Check torch, GPUs, exactness and the file system.", START),
    "tokenizer": Entry("unbroken.cli.tokenizer:command", "Train a tokenizer on your own text.", DATA),
    "tokenize": Entry("unbroken.cli.tokenize:command", "Tokenize text into shards (resumable).", DATA),
    "data": Entry("unbroken.cli.data:command", "Inspect, verify and decode tokenized data.", DATA),
    "train": Entry("unbroken.cli.train:command", "Start or resume a GPT training run.", TRAIN),
    "run": Entry("unbroken.cli.run:command", "Run a training script and forward signals to it.", TRAIN),
    "launch": Entry("unbroken.cli.launch:command", "Run a training script, restarting it until it is done.", TRAIN),
    "slurm": Entry("unbroken.cli.slurm:command", "Run as SLURM jobs that requeue themselves.", TRAIN),
    "kubernetes": Entry("unbroken.cli.kubernetes:command", "Print a Kubernetes manifest for a run.", TRAIN),
    "plan": Entry("unbroken.cli.plan:command", "Estimate save interval, lost time and end of a run.", TRAIN),
    "status": Entry("unbroken.cli.status:command", "Show the state of a run.", CONTROL),
    "stop": Entry("unbroken.cli.stop:command", "Stop a run after a last save, or kill it.", CONTROL),
    "outcome": Entry("unbroken.cli.outcome:command", "Show how the last job of a run ended.", CONTROL),
    "release": Entry("unbroken.cli.release:command", "Release the lease of a job that is gone.", CONTROL),
    "ls": Entry("unbroken.cli.ls:command", "List the checkpoints of a run.", CHECKPOINTS),
    "show": Entry("unbroken.cli.show:command", "Show the manifest of a checkpoint.", CHECKPOINTS),
    "verify": Entry("unbroken.cli.verify:command", "Verify the checksums of checkpoints.", CHECKPOINTS),
    "diff": Entry("unbroken.cli.diff:command", "Compare two checkpoints tensor by tensor.", CHECKPOINTS),
    "prune": Entry("unbroken.cli.prune:command", "Delete checkpoints that no keep policy retains.", CHECKPOINTS),
    "pin": Entry("unbroken.cli.pin:pin", "Protect a checkpoint from being deleted.", CHECKPOINTS),
    "unpin": Entry("unbroken.cli.pin:unpin", "Remove the pin of a checkpoint.", CHECKPOINTS),
    "seal": Entry("unbroken.cli.seal:command", "Add a manifest to a checkpoint of another tool.", CHECKPOINTS),
    "mirror": Entry("unbroken.cli.mirror:command", "Copy checkpoints to the mirrors of a run.", CHECKPOINTS),
    "fetch": Entry("unbroken.cli.fetch:command", "Fetch checkpoints from a mirror.", CHECKPOINTS),
    "import": Entry("unbroken.cli.import_command:command", "Import a checkpoint of another tool.", CHECKPOINTS),
    "evaluate": Entry("unbroken.cli.evaluate:command", "Compute the validation loss of a checkpoint.", MODEL),
    "generate": Entry("unbroken.cli.generate:command", "Generate text from a prompt.", MODEL),
    "batch-generate": Entry("unbroken.cli.batch_generate:command", "Generate text for a file of prompts.", MODEL),
    "export": Entry("unbroken.cli.export:command", "Export weights to PyTorch, safetensors or Hugging Face.", MODEL),
    "prove": Entry("unbroken.cli.prove:command", "Break your training on purpose and compare every bit.", EXACT),
    "replay": Entry("unbroken.cli.replay:command", "Recompute between two checkpoints, compare every bit.", EXACT),
    "explain": Entry("unbroken.cli.explain:command", "Explain an error, an exit code or a config field.", HELP),
    "completion": Entry("unbroken.cli.completion:command", "Print a shell completion script.", HELP),
}
