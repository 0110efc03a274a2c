"""``unbroken prove``: a user's own training command, killed, stopped, resized and damaged, and compared bit for bit."""

import os
import secrets
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NoReturn

import click

from unbroken.cli.arguments import FiniteRange
from unbroken.cli.output import Output, as_command
from unbroken.errors import BadUsage
from unbroken.prove.command import RANKS, Command, understood
from unbroken.prove.fault_schedule import FAULTS, RESIZE
from unbroken.prove.proof_report import Proof
from unbroken.prove.proof_setup import ProofSetup, environment, proof_folder
from unbroken.prove.prove import ProveOptions, prove

PROGRAM: Final = "unbroken prove"
EXIT_DIFFERS: Final = 3
_MINUTES: Final = 5.0
_MOST_RANKS: Final = 64
# Short of time is the proof, not the machine that loads torch.
_LEAST_UNINTERRUPTED_S: Final = 120.0


@as_command("prove", context_settings={"allow_interspersed_args": False})
@click.option(
    "--minutes", type=FiniteRange(0, min_open=True), default=_MINUTES, show_default=True, metavar="M",
    help="Begin no further chain after M minutes; one is always made. An uninterrupted run has as long, 2 at least.",
)  # fmt: skip
@click.option("--faults", metavar="LIST", help=f"Only these, by commas: {', '.join(FAULTS)}.")
@click.option("--seed", type=click.IntRange(0), metavar="S", help="What the schedule follows from; random if not said.")
@click.option("--chain", type=click.IntRange(1), metavar="N", help="Make chain N of the seed, and no other.")
@click.option(
    "--ranks", metavar="LIST", help="Numbers of ranks to try, by commas; the first for the uninterrupted run."
)
@click.option(
    "--dir",
    "folder",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Where the runs are made, and stay.",
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
    """Break your own training on purpose; compare every bit.

    COMMAND is any command whose training loop is an unbroken.Run. It is run twice without interruption, then as chains
    of short jobs, each of which meets a fault. Its run is sent to a folder of the proof's own: the real one is never
    touched. {run} and {ranks} in COMMAND are replaced by the directory and the number of ranks. Exit code 3: the bits
    differ.
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
    output.document("unbroken.prove/1", proof.facts(), lambda: proof.text(output.style))
    return _exit_code(proof)


def _exit_code(proof: Proof) -> int:
    return 0 if proof.is_proven else EXIT_DIFFERS


def _require_command(words: tuple[str, ...]) -> Command:
    if not words:
        complaint = "the command is missing; it stands last: unbroken prove -- python train.py"
        raise BadUsage(command=PROGRAM, complaint=complaint)
    given = understood(words)
    program = given.words[0]
    if not given.is_startable:
        meant = f"; did you mean `python {program}`?" if program.endswith(".py") else ""
        raise BadUsage(command=PROGRAM, complaint=f"there is no program '{program}' that could be started{meant}")
    return given


def _chosen(told: str | None) -> tuple[str, ...]:
    if told is None:
        return tuple(FAULTS)
    names = [name.strip() for name in told.split(",") if name.strip()]
    unknown = [name for name in names if name not in FAULTS]
    if unknown or not names:
        what = f"no fault is called {', '.join(map(repr, unknown))}" if unknown else "--faults names none"
        raise BadUsage(command=PROGRAM, complaint=f"{what}; there are {', '.join(FAULTS)}")
    return tuple(name for name in FAULTS if name in names)


def _numbers(told: str | None, given: Command) -> tuple[int, ...]:
    if told is None:
        return ()
    pieces = [piece.strip() for piece in told.split(",")]
    if not all(piece.isdecimal() and 1 <= int(piece) <= _MOST_RANKS for piece in pieces):
        complaint = f"--ranks is a list such as 1,2,3, of numbers from 1 to {_MOST_RANKS}, not '{told}'"
        raise BadUsage(command=PROGRAM, complaint=complaint)
    if not given.sets_ranks:
        complaint = f"--ranks: the command does not say where; write {RANKS} in it, or use torchrun or `unbroken run`"
        raise BadUsage(command=PROGRAM, complaint=complaint)
    return tuple(dict.fromkeys(map(int, pieces)))


@contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM ends the proof as Ctrl-C does: with its jobs, and with what it mounted."""

    def leave(number: int, frame: object) -> NoReturn:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
