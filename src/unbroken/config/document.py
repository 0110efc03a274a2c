"""The whole config: four sections, their plain JSON form, and a digest.

The digest is that of a canonical form (sorted keys, no blanks, each number in the type of its field), so two configs
with the same values have the same digest however they were written.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Final

from unbroken.config.fields import Field, fields_of
from unbroken.config.sections import CurriculumPhase, DataConfig, ModelConfig, OptimizerConfig, TrainingConfig

SCHEMA: Final = "unbroken.config/1"
SECTIONS: Final[dict[str, type]] = {
    "model": ModelConfig,
    "data": DataConfig,
    "optimizer": OptimizerConfig,
    "training": TrainingConfig,
}


@dataclass(frozen=True, kw_only=True)
class Config:
    """The config of a run: four sections of fields."""

    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    training: TrainingConfig = TrainingConfig()

    def value(self, dotted: str) -> Any:  # noqa: ANN401 -- each field has its own type
        """The value of ``section.field``."""
        section, _, name = dotted.partition(".")
        return getattr(getattr(self, section), name)

    def global_batch_size(self, starting_world: int) -> int:
        """Sequences per step: as set, or derived from the two batch fields and the world size of the first job."""
        training = self.training
        if training.global_batch_size is not None:
            return training.global_batch_size
        return training.per_device_batch_size * training.gradient_accumulation_steps * starting_world

    def lanes(self, starting_world: int = 1) -> int:
        """Lanes per step; ``starting_world`` matters only in a config that is not settled."""
        return self.global_batch_size(starting_world) // self.training.per_device_batch_size

    def settled(self, starting_world: int) -> "Config":
        """The config as a run records it, with the global batch size set."""
        training = replace(self.training, global_batch_size=self.global_batch_size(starting_world))
        return replace(self, training=training)

    def values(self) -> dict[str, dict[str, Any]]:
        """The sections as plain JSON values, every field present."""
        plain: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
        for field in all_fields().values():
            plain[field.section][field.name] = _plain(field, self.value(field.dotted))
        return plain

    def digest(self) -> str:
        """The SHA-256 of the canonical form; equal configs have equal digests."""
        return digest_of(self.values())

    def to_json(self) -> str:
        """The document that a run keeps as ``config.json``; ``from_json`` reads it back."""
        document = {"schema": SCHEMA, "digest": self.digest(), **self.values()}
        # ASCII only: a path that is not UTF-8 contains lone surrogates, which only an escape can represent.
        return json.dumps(document, indent=2, allow_nan=False) + "\n"


def digest_of(values: Mapping[str, Any]) -> str:
    """The digest of plain sections."""
    # Imported here: it loads a crypto library that most callers never need.
    import hashlib

    canonical = json.dumps(values, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return f"sha256:{hashlib.sha256(canonical.encode('utf-8', 'surrogatepass')).hexdigest()}"


@cache
def all_fields() -> dict[str, Field]:
    """Every field by its full name, in the order of the sections."""
    return {field.dotted: field for field in _each_field()}


def _each_field() -> Iterator[Field]:
    for section, cls in SECTIONS.items():
        yield from fields_of(section, cls).values()


def _plain(field: Field, value: Any) -> Any:  # noqa: ANN401 -- JSON is any
    if value is None or (field.shape.words and isinstance(value, str)):
        return value
    if field.shape.is_curriculum:
        return [_plain_phase(phase) for phase in value]
    if float in field.shape.scalars:
        return float(value)
    # Every first block means every block: one canonical form.
    if field.shape.scalars == {bool, int} and value == 1:
        return True
    return value


def _plain_phase(phase: CurriculumPhase) -> dict[str, Any]:
    mix = {bucket: float(weight) for bucket, weight in sorted(phase.mix)}
    return {"duration_tokens": phase.duration_tokens, "mix": mix}
