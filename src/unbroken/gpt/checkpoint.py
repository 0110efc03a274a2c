"""Load a run's model: its config, and the weights of one of its checkpoints, with all checksums verified.

Finding a checkpoint looks at names and sizes; only loading reads weights, and nothing is unpickled. If no checkpoint
was named, a damaged one is skipped for the next older one, as at a resume.
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from unbroken.config import Config
from unbroken.config.reading import from_json
from unbroken.errors import DamagedCheckpoint, NoAverage, PathMissing
from unbroken.files import LOCAL
from unbroken.gpt.model import GPT
from unbroken.records.layout import Layout, run_of
from unbroken.records.run_references import resolve
from unbroken.state import payload
from unbroken.state.index import Index
from unbroken.store.check import Finding, Level, Verdict, verify
from unbroken.store.choose import Choice, SkippedCheckpoint, choose
from unbroken.store.directory import Store
from unbroken.store.manifest import Manifest
from unbroken.store.scan import newest_first, scan
from unbroken.world import World

_LIMIT_BYTES = 1 << 20
_EMBEDDING = "model.embedding.weight"
# The item that holds the average of the weights.
_AVERAGE = "ema"


@dataclass(frozen=True)
class LoadedModel:
    """A model in evaluation mode, and the checkpoint it comes from."""

    model: GPT
    found: "FoundModel"

    @property
    def config(self) -> Config:
        """What its run was started with."""
        return self.found.config

    @property
    def run(self) -> Path:
        """The run's directory."""
        return self.found.layout.run

    @property
    def name(self) -> str:
        """The checkpoint's name."""
        return self.found.name

    @property
    def step(self) -> int | None:
        """The checkpoint's step."""
        return self.found.manifest.step


@dataclass(frozen=True)
class FoundModel:
    """A checkpoint of the trainer that was found and not read; ``skipped`` are newer ones that cannot be used.

    ``layout`` is the run it belongs to, whose checkpoints may be in an object store.
    ``is_named``: the user named this checkpoint; ``is_averaged``: load its weight average.
    """

    store: Store
    layout: Layout
    name: str
    manifest: Manifest
    config: Config
    index: Index
    skipped: tuple[SkippedCheckpoint, ...] = ()
    is_named: bool = False
    is_averaged: bool = False

    @property
    def path(self) -> Path:
        """Its path."""
        return self.store.path(self.name)

    @property
    def rows(self) -> int:
        """Rows of the embedding: how many ids the model has."""
        held = self.index.tensors.get(_EMBEDDING)
        # A missing embedding is reported when the weights are read, with all else that is missing.
        return 1 if held is None else held.shape[0]

    def load(self, device: torch.device, dtype: torch.dtype | None = None) -> LoadedModel:
        """Read the weights, in their own dtype unless another is given.

        Raises:
            DamagedCheckpoint: the named checkpoint is damaged.
            NoUsableCheckpoint: none was named, and all are damaged.
            NoAverage: an older one has to be used, and has no average.
            StateDiffers: its weights do not match its config.
            StorageFailed: an I/O error.
        """
        found = self
        while True:
            try:
                return found._read(device, dtype)
            except DamagedCheckpoint as damaged:
                if found.is_named:
                    raise
                found = found._older(damaged)

    def _older(self, damaged: DamagedCheckpoint) -> "FoundModel":
        """The next older checkpoint that looks complete."""
        over = _skipped(self.name, self.manifest, damaged)
        return _newest(self.store, self.layout, (*self.skipped, over), is_averaged=self.is_averaged)

    def _read(self, device: torch.device, dtype: torch.dtype | None) -> LoadedModel:
        # On the meta device first: weights that are about to be loaded need no initialisation.
        with torch.device("meta"):
            model = GPT(self.config.model, self.rows)
        model.to_empty(device="cpu")
        item = _AVERAGE if self.is_averaged else "model"
        places = {f"{item}.{key}": tensor for key, tensor in model.state_dict().items()}
        payload.read(self.store, self.name, self.manifest, self.index, places, World(0, 1))
        return LoadedModel(model.to(device, dtype).eval(), self)


def find_model(reference: str, *, is_averaged: bool = False) -> FoundModel:
    """The newest usable checkpoint of a run, or the one that is named (``runs/a@1000``, or its path).

    Args:
        reference: a run, a step of it, or a checkpoint's path.
        is_averaged: whether to load the average of the weights.

    Raises:
        PathMissing: the run does not exist or has no config.
        CheckpointUnknown: the run has no such checkpoint.
        NoUsableCheckpoint: it has no complete checkpoint.
        DamagedCheckpoint: the named checkpoint is damaged.
        NoAverage: it has no weight average.
        StorageFailed: an I/O error.
    """
    named = resolve(reference)
    store, layout = named.store, run_of(named.records or named.store)
    if named.name is None:
        return _newest(store, layout, is_averaged=is_averaged)
    return _found(store, layout, _whole(store, named.name), is_named=True, is_averaged=is_averaged)


def _newest(
    store: Store, layout: Layout, skipped: tuple[SkippedCheckpoint, ...] = (), *, is_averaged: bool
) -> FoundModel:
    """The newest checkpoint that looks complete and was not skipped."""
    while True:
        known = {over.name for over in skipped}
        names = [name for name in newest_first(store, scan(store).committed) if name not in known]
        found = choose(names, lambda name: verify(store, name, Level.QUICK))
        skipped = (*skipped, *found.skipped)
        chosen = Choice(found.chosen, skipped).required(store)
        try:
            return _found(store, layout, chosen, skipped=skipped, is_averaged=is_averaged)
        except DamagedCheckpoint as damaged:
            # The index is read here; the quick check of sizes does not see a flipped bit in it.
            skipped = (*skipped, _skipped(chosen.name, chosen.manifest, damaged))


def _skipped(name: str, manifest: Manifest | None, damaged: DamagedCheckpoint) -> SkippedCheckpoint:
    findings = tuple(Finding(*_split_finding(text)) for text in damaged.findings or (damaged.headline(),))
    return SkippedCheckpoint(Verdict(name, Level.FULL, manifest, findings))


def _found(
    store: Store,
    layout: Layout,
    verdict: Verdict,
    *,
    skipped: tuple[SkippedCheckpoint, ...] = (),
    is_named: bool = False,
    is_averaged: bool,
) -> FoundModel:
    assert verdict.manifest is not None
    config = _config(layout)
    index = payload.read_index(store, verdict.name, verdict.manifest)
    if is_averaged and not any(name.startswith(f"{_AVERAGE}.") for name in index.tensors):
        raise NoAverage(checkpoint=store.path(verdict.name))
    return FoundModel(store, layout, verdict.name, verdict.manifest, config, index, skipped, is_named, is_averaged)


def _split_finding(finding: str) -> tuple[str, str]:
    """The part and what is wrong with it."""
    part, _, problem = finding.partition(": ")
    return (part, problem) if problem else ("state", part)


def _whole(store: Store, name: str) -> Verdict:
    # Raises its own error for a damaged manifest or a newer format.
    store.read_manifest(name)
    verdict = verify(store, name, Level.QUICK)
    if not verdict.is_sound:
        raise verdict.error(store)
    return verdict


def _config(layout: Layout) -> Config:
    if LOCAL.find(layout.config) is None:
        raise PathMissing(path=layout.config, purpose="config of a run of the trainer")
    text = LOCAL.read_bytes(layout.config, limit_bytes=_LIMIT_BYTES).decode("utf-8", "replace")
    return from_json(text, str(layout.config)).config
