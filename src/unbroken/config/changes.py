"""Compares the config a run was started with to that of a job, by the resume class of each field."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from unbroken.config.document import SCHEMA, Config, all_fields, digest_of
from unbroken.config.fields import ResumeClass
from unbroken.config.reading import from_json

GLOBAL_BATCH = "training.global_batch_size"


@dataclass(frozen=True)
class Difference:
    """One field whose value differs from the one the run was started with; both values in plain JSON form."""

    field: str
    resume: ResumeClass
    started_with: Any
    now: Any


@dataclass(frozen=True)
class Differences:
    """All differences, by resume class."""

    fixed: tuple[Difference, ...] = ()
    declared: tuple[Difference, ...] = ()
    free: tuple[Difference, ...] = ()

    def not_accepted(self, accepted: frozenset[str]) -> tuple[Difference, ...]:
        """The declared differences that were not accepted by name."""
        return tuple(difference for difference in self.declared if difference.field not in accepted)


def compare(started: Config, now: Config) -> Differences:
    """The fields that a job changes in the run it resumes.

    ``started`` is the run's record, which has a global batch size. A job that leaves it null uses the record's, so
    a run keeps its batch size on another number of ranks.
    """
    found = tuple(_differences(started, now))
    by_class = {cls: tuple(each for each in found if each.resume is cls) for cls in ResumeClass}
    return Differences(by_class[ResumeClass.FIXED], by_class[ResumeClass.DECLARED], by_class[ResumeClass.FREE])


def _differences(started: Config, now: Config) -> Iterator[Difference]:
    before, after = started.values(), now.values()
    for name, field in all_fields().items():
        was, is_now = before[field.section][field.name], after[field.section][field.name]
        if was == is_now or (name == GLOBAL_BATCH and is_now is None):
            continue
        yield Difference(name, field.declaration.resume, was, is_now)


def with_values(config: Config, changes: Mapping[str, Any]) -> Config:
    """A config with some fields replaced, by their full names; fields that are no longer known are left out."""
    values = config.values()
    for name, value in changes.items():
        if name in all_fields():
            section, _, field = name.partition(".")
            values[section][field] = value
    document = {"schema": SCHEMA, "digest": digest_of(values), **values}
    return from_json(json.dumps(document), "config.json").config


def computing_values(config: Config) -> dict[str, Any]:
    """The fields that the bits of a step depend on, in plain JSON form: all that are not free."""
    values = config.values()
    return {
        name: values[field.section][field.name]
        for name, field in all_fields().items()
        if field.declaration.resume is not ResumeClass.FREE
    }
