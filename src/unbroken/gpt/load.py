"""A run's model for reading: its config, and the weights of one of its checkpoints, every byte proven.

Finding it costs a look at names and sizes; only loading reads weights, and nothing is ever unpickled.
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from unbroken.config import Config, from_json
from unbroken.errors import PathMissing
from unbroken.files import LOCAL
from unbroken.gpt.model import GPT
from unbroken.run.layout import Layout, run_of
from unbroken.state import payload
from unbroken.state.index import Index
from unbroken.store.check import Level, Verdict, verify
from unbroken.store.choose import PassedOver, choose
from unbroken.store.manifest import Manifest
from unbroken.store.place import Store
from unbroken.store.refer import resolve
from unbroken.store.scan import newest_first, scan
from unbroken.world import World

_LIMIT_BYTES = 1 << 20
_EMBEDDING = "model.embedding.weight"


@dataclass(frozen=True)
class Loaded:
    """A model in evaluation mode, and where it comes from."""

    model: GPT
    config: Config
    run: Path
    name: str
    step: int | None


@dataclass(frozen=True)
class Found:
    """A checkpoint of the trainer, looked at and not read; ``passed_over`` are newer ones that cannot be used."""

    store: Store
    name: str
    manifest: Manifest
    config: Config
    index: Index
    passed_over: tuple[PassedOver, ...] = ()

    @property
    def layout(self) -> Layout:
        """The run it belongs to."""
        return run_of(self.store)

    @property
    def path(self) -> Path:
        """Where it stands."""
        return self.store.path(self.name)

    @property
    def rows(self) -> int:
        """Rows of the embedding: how many ids the model has."""
        held = self.index.tensors.get(_EMBEDDING)
        # Where there is no embedding, reading says so, with all else that is missing.
        return 1 if held is None else held.shape[0]

    def load(self, device: torch.device, dtype: torch.dtype | None = None) -> Loaded:
        """Read the weights; they are kept in their own type unless another is asked for.

        Raises:
            DamagedCheckpoint: bytes are not what was written.
            StateDiffers: its weights are not those of its config.
            StorageFailed: the system refused to read.
        """
        # Without memory at first: weights that are about to be read are not drawn before.
        with torch.device("meta"):
            model = GPT(self.config.model, self.rows)
        model.to_empty(device="cpu")
        places = {f"model.{key}": tensor for key, tensor in model.state_dict().items()}
        payload.read(self.store, self.name, self.manifest, self.index, places, World(0, 1))
        return Loaded(model.to(device, dtype).eval(), self.config, self.layout.run, self.name, self.manifest.step)


def find_model(reference: str) -> Found:
    """The newest usable checkpoint of a run, or the one that is named (``runs/a@1000``, or its path).

    Raises:
        PathMissing: there is no such run, or it has no config.
        CheckpointUnknown: the run has no such checkpoint.
        NoUsableCheckpoint: it has none that is whole.
        DamagedCheckpoint: the one that was named is not whole.
        StorageFailed: the system refused to read.
    """
    named = resolve(reference)
    store = named.store
    passed_over: tuple[PassedOver, ...] = ()
    if named.name is not None:
        verdict = _whole(store, named.name)
    else:
        names = newest_first(store, scan(store).committed)
        choice = choose(names, lambda name: verify(store, name, Level.QUICK))
        verdict, passed_over = choice.required(store), choice.passed_over
    assert verdict.manifest is not None
    config = _config(run_of(store))
    index = payload.read_index(store, verdict.name, verdict.manifest)
    return Found(store, verdict.name, verdict.manifest, config, index, passed_over)


def _whole(store: Store, name: str) -> Verdict:
    # Its own words for a manifest that cannot be trusted, or is of a newer format.
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
