"""What comparing steps that were computed twice has shown: how many agree, and which do not. Pure words and numbers."""

from dataclasses import asdict, dataclass
from typing import Any

from unbroken import amounts


@dataclass(frozen=True)
class Mismatch:
    """One metric of one step that two jobs computed differently."""

    step: int
    metric: str
    first_job: int
    first_bits: str
    second_job: int
    second_bits: str

    def sentence(self) -> str:
        """What is wrong, loudly."""
        return (
            f"step {amounts.count(self.step)} was computed twice and does not agree: {self.metric} was "
            f"{self.first_bits} in job {self.first_job} and is {self.second_bits} in job {self.second_job}; "
            "causes to check, in this order: config or hyperparameters that the script changed between the two jobs, "
            "state that was not passed to the run, a nondeterministic kernel, silent data corruption"
        )

    def facts(self) -> dict[str, Any]:
        """The same for the journal, as a ``mismatch``."""
        return asdict(self)


@dataclass(frozen=True)
class Recomputed:
    """How many steps were computed again after they had been lost, and how many of them agree bit for bit."""

    compared: int = 0
    agreeing: int = 0
    mismatches: tuple[Mismatch, ...] = ()

    def sentence(self) -> str | None:
        """The proof in one line; None where nothing was computed twice."""
        if not self.compared:
            return None
        was = "was" if self.compared == 1 else "were"
        verb = "agrees" if self.compared == 1 else "agree"
        proof = (
            f"{amounts.plural(self.compared, 'step')} {was} computed twice; "
            f"{amounts.count(self.agreeing)} of {amounts.count(self.compared)} {verb} bit for bit"
        )
        return f"{proof}; {self.mismatches[0].sentence()}" if self.mismatches else proof
