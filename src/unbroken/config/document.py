"""The whole config: four sections, their plain JSON form, and a digest that says when two configs are the same.

The canonical form is sorted, without blanks, and gives each number the type of its field, so the digest depends
on what a config says and never on how it was written.
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
    """What a run is: the one object a training loop is configured by."""

    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    training: TrainingConfig = TrainingConfig()

    def value(self, dotted: str) -> Any:  # noqa: ANN401 -- each field has its own type
        """The value of ``section.field``."""
        section, _, name = dotted.partition(".")
        return getattr(getattr(self, section), name)

    def global_batch_size(self, starting_world: int) -> int:
        """Sequences per step: as set, or what the first job's ranks make of the two batch fields."""
        training = self.training
        if training.global_batch_size is not None:
            return training.global_batch_size
        return training.per_device_batch_size * training.gradient_accumulation_steps * starting_world

    def settled(self, starting_world: int) -> "Config":
        """The config as a run records it: the global batch is a number, whatever the world becomes later."""
        training = replace(self.training, global_batch_size=self.global_batch_size(starting_world))
        return replace(self, training=training)

    def values(self) -> dict[str, dict[str, Any]]:
        """The sections as plain JSON values, every field present."""
        plain: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
        for field in all_fields().values():
            plain[field.section][field.name] = _plain(field, self.value(field.dotted))
        return plain

    def digest(self) -> str:
        """The SHA-256 of the canonical form: equal for configs that say the same."""
        return digest_of(self.values())

    def to_json(self) -> str:
        """The document that a run keeps as ``config.json``; ``from_json`` reads it back."""
        document = {"schema": SCHEMA, "digest": self.digest(), **self.values()}
        # ASCII only: a path that is no UTF-8 comes in as lone surrogates, which nothing but an escape can carry.
        return json.dumps(document, indent=2, allow_nan=False) + "\n"


def digest_of(values: Mapping[str, Any]) -> str:
    """The digest of plain sections as they stand."""
    # Imported here: it loads a crypto library, which most readers of a field never need.
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
    # Every first block is every block: one meaning, one form.
    if field.shape.scalars == {bool, int} and value == 1:
        return True
    return value


def _plain_phase(phase: CurriculumPhase) -> dict[str, Any]:
    mix = {bucket: float(weight) for bucket, weight in sorted(phase.mix)}
    return {"duration_tokens": phase.duration_tokens, "mix": mix}
