"""Streaming datasets of Hugging Face's ``datasets``: what their state leaves out.

Their state_dict has no shuffle buffer: after ``load_state_dict`` the samples that were in it are lost. And a generator
of the user's own is started again, so that it draws other random numbers. Such a pipeline is replayed: its order is a
function of its seed and the epoch. Every other state is exact at every sample. The epoch must be set in each epoch, or
every one has the same order, and a loaded state is loaded again and again.
"""

from typing import Any, Final

from unbroken.state.pipelines import is_of, stages_of
from unbroken.state.wrappers import real_loader

_PACKAGE: Final = "datasets."
_READERS: Final = "datasets.packaged_modules."
_USERS_GENERATOR: Final = "datasets.packaged_modules.generator."
# Stages that read ahead of what they give, and at a resume compute that again.
_READS_AHEAD: Final = (
    "CyclingMultiSourcesExamplesIterable",
    "RandomlyCyclingMultiSourcesExamplesIterable",
    "HorizontallyConcatenatedMultiSourcesExamplesIterable",
    "RebatchedArrowExamplesIterable",
)
# Stages that read what is below them in threads.
_THREADED: Final = (
    "CyclingMultiSourcesExamplesIterable",
    "RandomlyCyclingMultiSourcesExamplesIterable",
    "InterleavedShardsExamplesIterable",
)
# NumPy takes so many bits from the system where it gets no seed.
_SYSTEM_ENTROPY: Final = 1 << 96


def streaming_in(loader: object) -> Any:  # noqa: ANN401 - of a library that may not be installed
    """The streaming dataset that is a loader, or that a loader reads; None where there is none."""
    inner = real_loader(loader)
    for each in (inner, getattr(inner, "dataset", None)):
        if is_of(each, _PACKAGE, "IterableDataset"):
            return each
    return None


def says_all(dataset: object) -> bool:
    """Whether a streaming dataset's state is all there is to restore."""
    return not any(_has_buffer(stage) or _runs_users_generator(stage) for stage in stages_of(dataset))


def remarks(loader: object) -> list[str]:
    """Warnings about a streaming dataset when a run is entered."""
    dataset = streaming_in(loader)
    if dataset is None:
        return []
    found, stages = [], list(stages_of(dataset))
    if any(_is_unseeded(stage) for stage in stages):
        found.append(
            "not exact: shuffle() of the streaming dataset has no seed, so that each job shuffles differently; "
            "shuffle(seed=...) makes it exact"
        )
    if any(_has_buffer(stage) for stage in stages):
        found.append(
            "the state of a streaming dataset does not include its shuffle buffer: "
            "a resume reads the epoch again up to its position"
        )
    if says_all(dataset) and _computes_again(stages):
        found.append(
            "a resume calls functions of map() and filter() again for samples that were read ahead: "
            "exact unless they draw random numbers"
        )
    elif _has_function(_below(stages, _THREADED)):
        # shuffle() interleaves shards, and fetches from each in a thread.
        found.append(
            "the streaming dataset calls functions of map() and filter() in threads, ahead of the loop: "
            "exact unless they draw random numbers"
        )
    return found


def _has_buffer(stage: object) -> bool:
    # A buffer of one sample holds nothing back.
    return is_of(stage, _PACKAGE, "BufferShuffledExamplesIterable") and getattr(stage, "buffer_size", 2) > 1


def _runs_users_generator(stage: object) -> bool:
    if not is_of(stage, _PACKAGE, "ExamplesIterable"):
        return False
    made_by: Any = getattr(stage, "generate_examples_fn", None)
    module = f"{type(getattr(made_by, '__self__', None)).__module__}."
    if module.startswith(_READERS):
        return module.startswith(_USERS_GENERATOR)
    return not str(getattr(made_by, "__module__", "")).startswith(_PACKAGE)


def _is_unseeded(stage: object) -> bool:
    generator: Any = getattr(stage, "generator", None)
    if not is_of(stage, _PACKAGE, "_BaseExamplesIterable") or not is_of(generator, "numpy.", "Generator"):
        return False
    entropy = getattr(generator.bit_generator.seed_seq, "entropy", None)
    return isinstance(entropy, int) and entropy >= _SYSTEM_ENTROPY


def _computes_again(stages: list[object]) -> bool:
    batched = [stage for stage in stages if getattr(stage, "batched", False)]
    return _has_function([*_below(stages, _READS_AHEAD), *batched])


def _below(stages: list[object], names: tuple[str, ...]) -> list[object]:
    """What stages with one of these names read from, and they themselves."""
    found = [stage for stage in stages if any(is_of(stage, _PACKAGE, name) for name in names)]
    return [below for stage in found for below in stages_of(stage)]


def _has_function(stages: list[object]) -> bool:
    return any(is_of(stage, _PACKAGE, "MappedExamplesIterable") for stage in stages)
