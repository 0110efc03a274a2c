"""The whole proof: two uninterrupted runs, then chains with a seeded schedule of faults until the time is up."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from unbroken.config.reading import from_json
from unbroken.errors import BadUsage
from unbroken.files import LOCAL
from unbroken.prove import small_disk
from unbroken.prove.baseline import Baseline, require_same, run_alone
from unbroken.prove.chain import Chain
from unbroken.prove.fault_schedule import RESIZE, plan_chain
from unbroken.prove.proof_report import Proof
from unbroken.prove.proof_setup import ProofSetup
from unbroken.quoting import amounts
from unbroken.records.layout import Layout

# A chained job may take longer than the whole uninterrupted run: slow storage, delayed steps, imports of torch.
_PATIENCE: Final = 10.0
_LEAST_PATIENCE_S: Final = 300.0
_MOST_ROOM_BYTES: Final = 4 << 30
_RANKS_TRIED: Final = (1, 2, 3)


@dataclass(frozen=True)
class ProveOptions:
    """The options of a proof.

    Attributes:
        faults: names of ``schedule.FAULTS``.
        seed: the seed of the schedule.
        ranks: the numbers of ranks to try, that of the uninterrupted run first; empty if not given.
        limit_s: no new chain is started after this time.
        chain: the number of the first chain, or of the only one if ``is_single``.
    """

    faults: tuple[str, ...]
    seed: int
    ranks: tuple[int, ...]
    limit_s: float
    chain: int = 1
    is_single: bool = False


def prove(setup: ProofSetup, asked: ProveOptions, say: Callable[[str], None]) -> Proof:
    """Prove that a command's run survives faults; failed chains are in the result.

    Raises:
        NothingToProve: the command has no run that can be interrupted and compared.
        BaselineFails: it fails without any fault.
        NotDeterministic: two uninterrupted runs differ.
        BadUsage: none of the faults can be tried here.
        StorageFailed: the folder could not be written.
    """
    began_s = time.monotonic()
    faults, left_out = _possible(setup, asked)
    for fault, reason in left_out:
        say(f"left out: {fault}: {reason}")
    proof = Proof(setup.command.given, asked.seed, faults, asked.ranks, setup.folder, left_out)
    first_ranks = asked.ranks[0] if asked.ranks else None
    say("running it uninterrupted")
    baseline = proof.baseline = run_alone(setup, "uninterrupted", save_steps=None, ranks=first_ranks)
    took = f"{amounts.plural(baseline.steps, 'step')} in {amounts.duration(baseline.seconds)}"
    say(f"{took}; running it once more, saved every {amounts.plural(baseline.save_steps, 'step')}")
    again = run_alone(setup, "uninterrupted-again", save_steps=baseline.save_steps, ranks=first_ranks)
    same = proof.uninterrupted = require_same(setup, baseline, again)
    baseline = proof.baseline = replace(baseline, idle=same.state.idle if same.state else ())
    LOCAL.remove_tree(again.run)
    _settle(proof, baseline)
    chains = replace(setup, limit_s=max(_LEAST_PATIENCE_S, _PATIENCE * baseline.seconds))
    number = asked.chain
    while True:
        planned_jobs = plan_chain(asked.seed, number, proof.faults, proof.ranks)
        made = Chain(chains, baseline, number, say).make(planned_jobs)
        proof.chains.append(made)
        proof.seconds = time.monotonic() - began_s
        if not made.is_proven or asked.is_single or proof.seconds >= asked.limit_s:
            return proof
        LOCAL.remove_tree(made.run)
        number += 1


def _settle(proof: Proof, baseline: Baseline) -> None:
    """Settle what is known only after the first run: possible ranks, and the size of a full disk."""
    left_out = list(proof.left_out)
    if RESIZE in proof.faults and not proof.ranks:
        proof.ranks = _ranks_of_config(baseline)
        if len(proof.ranks) < 2:
            proof.faults = tuple(fault for fault in proof.faults if fault != RESIZE)
            left_out.append((RESIZE, "its config is exact on one rank only"))
    if "full" in proof.faults and baseline.checkpoint_bytes > _MOST_ROOM_BYTES:
        proof.faults = tuple(fault for fault in proof.faults if fault != "full")
        left_out.append(("full", f"a checkpoint has {amounts.size(baseline.checkpoint_bytes)}, too much for memory"))
    proof.left_out = tuple(left_out)


def _ranks_of_config(baseline: Baseline) -> tuple[int, ...]:
    """The ranks that the GPT trainer can be tried on: its lanes allow them, and it is exact."""
    path = Layout(baseline.run).config
    config = from_json(LOCAL.read_bytes(path, limit_bytes=1 << 20).decode(), str(path)).config
    if not config.training.exact:
        return ()
    lanes = config.lanes(baseline.ranks)
    others = [ranks for ranks in _RANKS_TRIED if ranks <= lanes and ranks != baseline.ranks]
    return (baseline.ranks, *others)


def _possible(setup: ProofSetup, asked: ProveOptions) -> tuple[tuple[str, ...], tuple[tuple[str, str], ...]]:
    """The faults that can be tried here, and those that cannot, each with the reason."""
    reasons: dict[str, str] = {}
    if "full" in asked.faults and (reason := small_disk.why_not(setup.folder)) is not None:
        reasons["full"] = reason
    if RESIZE in asked.faults and len(asked.ranks) < 2 and (asked.ranks or setup.command.program != "train"):
        reasons[RESIZE] = "the possible numbers of ranks were not given (--ranks 1,2)"
    possible = tuple(fault for fault in asked.faults if fault not in reasons)
    if not possible:
        raise BadUsage(command="unbroken prove", complaint=f"no fault is left: {'; '.join(reasons.values())}")
    return possible, tuple(reasons.items())
