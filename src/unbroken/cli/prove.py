"""``unbroken prove``: kills, stops, resizes and damages a training command and compares the results bit for bit."""

import os
import secrets
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NoReturn

import click

from unbroken.cli.arguments import DiskPath, FiniteRange
from unbroken.cli.output import Output, as_command
from unbroken.errors import BadUsage
from unbroken.prove.drilled_command import RANKS, DrilledCommand, understood
from unbroken.prove.fault_schedule import FAULTS, RESIZE
from unbroken.prove.proof_report import Proof
from unbroken.prove.proof_setup import ProofSetup, environment, proof_folder
from unbroken.prove.prove import ProveOptions, prove

PROGRAM: Final = "unbroken prove"
EXIT_DIFFERS: Final = 3
_MINUTES: Final = 5.0
_MOST_RANKS: Final = 64
# --minutes limits the proof, not how long a machine takes to import torch.
_LEAST_UNINTERRUPTED_S: Final = 120.0


@as_command(
    "prove",
    examples=(
        ("unbroken prove -- python train.py", "5 minutes of faults"),
        ("unbroken prove --ranks 1,2,4 -- torchrun --nproc-per-node {ranks} train.py", "also resize"),
        ("unbroken prove --seed 7 --chain 3 -- python train.py", "repeat one chain"),
    ),
    exit_codes={0: "all chains equal the uninterrupted run", 3: "some bits differ; what differs is shown"},
    context_settings={"allow_interspersed_args": False},
)
@click.option(
    "--minutes", type=FiniteRange(0, min_open=True), default=_MINUTES, metavar="M",
    help="Start no further chain after M minutes. Also the limit of the uninterrupted run, at least 2.",
)  # fmt: skip
@click.option("--faults", metavar="LIST", help=f"Comma-separated faults; default: all of {', '.join(FAULTS)}.")
@click.option("--seed", type=click.IntRange(0), metavar="S", help="Seed of the fault schedule; default: random.")
@click.option("--chain", type=click.IntRange(1), metavar="N", help="Run only chain N of the seed.")
@click.option(
    "--ranks",
    metavar="LIST",
    help="Comma-separated world sizes to resize to; the first is that of the uninterrupted run.",
)
@click.option(
    "--dir",
    "folder",
    type=DiskPath(file_okay=False),
    metavar="DIR",
    help="Directory for the runs, kept; default: a temporary one.",
)
@click.argument("words", metavar="-- COMMAND...", nargs=-1, type=click.UNPROCESSED)
def command(
    output: Output,
    minutes: float,
    faults: str | None,
    seed: int | None,
    chain: int | None,
    ranks: str | None,
    folder: Path | None,
    words: tuple[str, ...],
) -> int:
    """Break your training on purpose and compare every bit.

    COMMAND is any command whose training loop is an unbroken.Run. It runs twice without interruption, then as chains of
    short jobs, each with a fault: a kill, a stop, another world size, a damaged file. All runs use their own directory;
    your real run is not touched. {run} and {ranks} in COMMAND are replaced by the run directory and the world size.
    """
    given = _require_command(words)
    numbers = _numbers(ranks, given)
    chosen = _chosen(faults)
    asked = ProveOptions(chosen, secrets.randbelow(1 << 31) if seed is None else seed, numbers, minutes * 60)
    if chain is not None:
        asked = ProveOptions(asked.faults, asked.seed, numbers, asked.limit_s, chain, is_single=True)
    is_resized = RESIZE in chosen and (len(numbers) > 1 or given.program == "train")
    limit_s = max(asked.limit_s, _LEAST_UNINTERRUPTED_S)
    output.note(f"seed {asked.seed}")
    with proof_folder(folder, asked.seed) as place, _terminable():
        setup = ProofSetup(given, place.path, Path.cwd(), environment(os.environ, is_resized=is_resized), limit_s)
        proof = prove(setup, asked, output.note)
        place.is_kept = place.is_kept or not proof.is_proven
    output.document("unbroken.prove/1", proof.json_fields(), lambda: proof.text(output.style))
    return _exit_code(proof)


def _exit_code(proof: Proof) -> int:
    return 0 if proof.is_proven else EXIT_DIFFERS


def _require_command(words: tuple[str, ...]) -> DrilledCommand:
    if not words:
        complaint = "missing COMMAND; it comes last: unbroken prove -- python train.py"
        raise BadUsage(command=PROGRAM, complaint=complaint)
    given = understood(words)
    program = given.words[0]
    if not given.is_startable:
        meant = f"; did you mean `python {program}`?" if program.endswith(".py") else ""
        raise BadUsage(command=PROGRAM, complaint=f"no program '{program}' to run{meant}")
    return given


def _chosen(listed: str | None) -> tuple[str, ...]:
    if listed is None:
        return tuple(FAULTS)
    names = [name.strip() for name in listed.split(",") if name.strip()]
    unknown = [name for name in names if name not in FAULTS]
    if unknown or not names:
        what = f"unknown fault {', '.join(map(repr, unknown))}" if unknown else "--faults is empty"
        raise BadUsage(command=PROGRAM, complaint=f"{what}; known faults: {', '.join(FAULTS)}")
    return tuple(name for name in FAULTS if name in names)


def _numbers(listed: str | None, given: DrilledCommand) -> tuple[int, ...]:
    if listed is None:
        return ()
    pieces = [piece.strip() for piece in listed.split(",")]
    if not all(piece.isdecimal() and 1 <= int(piece) <= _MOST_RANKS for piece in pieces):
        complaint = f"--ranks must be a list of numbers from 1 to {_MOST_RANKS}, such as 1,2,4, not '{listed}'"
        raise BadUsage(command=PROGRAM, complaint=complaint)
    if not given.sets_ranks:
        complaint = f"--ranks needs {RANKS} in COMMAND, or torchrun or `unbroken run`"
        raise BadUsage(command=PROGRAM, complaint=complaint)
    return tuple(dict.fromkeys(map(int, pieces)))


@contextmanager
def _terminable() -> Iterator[None]:
    """Treat SIGTERM like Ctrl-C: stop all jobs and unmount what was mounted."""

    def leave(number: int, frame: object) -> NoReturn:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
