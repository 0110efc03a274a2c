"""Which names a person may accept for a run of the trainer, and which were accepted and not yet saved.

A name that means nothing is refused before anything is started: whoever mistypes one would else learn it from the
difference that is still refused, or, where nothing differs today, never.
"""

import difflib
from collections.abc import Collection, Iterable, Sequence
from typing import Final

from unbroken.config.document import all_fields
from unbroken.errors import AcceptUnknown
from unbroken.run.journal import Fact

# What the record of the arithmetic holds, on a CPU or on a GPU.
ARITHMETIC: Final = (
    *("lanes", "seed", "compute_dtype", "reduction"),
    *("torch", "torch_build", "device", "machine", "deterministic", "default_dtype", "inductor_deterministic"),
    *("instructions", "threads", "mkldnn"),
    *("gpu", "capability", "cuda", "hip", "cudnn", "cublas_workspace", "tf32_override", "matmul_fp32", "conv_fp32"),
    *("matmul_bf16_reduced", "matmul_fp16_reduced", "cudnn_benchmark", "cudnn_deterministic", "attention"),
)
# What a checkpoint is made of; a name may also stand below these, for a tensor.
ITEMS: Final = ("model", "optimizer", "ema", "scaler", "arithmetic", "data", "generators")
GROW: Final = "data.grow"
# A run whose record of its config is missing continues with the config of the job.
CONFIG: Final = "config.json"
_TENSORS: Final = ("model.", "optimizer.", "ema.")
_NEAREST: Final = 3


def require_known(accept: Collection[str], tensors: Iterable[str] | None = None) -> None:
    """Pass if every accepted name is one that could differ.

    Args:
        accept: the names.
        tensors: those of the state, by name; None where they are not known yet, and any name may be one's.

    Raises:
        AcceptUnknown: some are not; the nearest names are told.
    """
    known = {*all_fields(), *ARITHMETIC, *ITEMS, GROW, CONFIG}
    if tensors is not None:
        known |= {above for name in tensors for above in _above(name)}
    unknown = [
        name
        for name in dict.fromkeys(accept)
        if name not in known and not (tensors is None and name.startswith(_TENSORS))
    ]
    if unknown:
        told = sorted(known)
        nearest = ((name, tuple(difflib.get_close_matches(name, told, n=_NEAREST))) for name in unknown)
        raise AcceptUnknown(names=tuple(nearest))


def still_accepted(facts: Sequence[Fact]) -> tuple[str, ...]:
    """The names that earlier jobs accepted since the last commit, after which a checkpoint holds the new state itself.

    A job that is killed before it saves leaves the checkpoint as it was; what was accepted about it stays accepted.
    """
    names: dict[str, None] = {}
    for fact in facts:
        told, unmet = fact.values.get("names"), fact.values.get("without_difference")
        if fact.kind == "accept" and isinstance(told, list) and isinstance(unmet, list):
            names |= dict.fromkeys(name for name in told if isinstance(name, str) and name not in unmet)
        elif fact.kind in ("commit", "emergency-resume") or (fact.kind == "resume" and fact.values.get("set_aside")):
            names.clear()
    return tuple(names)


def _above(name: str) -> list[str]:
    """A tensor's name, and every name that stands for all below it."""
    parts = name.split(".")
    return [".".join(parts[:length]) for length in range(1, len(parts) + 1)]
