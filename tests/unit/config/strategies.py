"""Sound configs of every kind, made from the field declarations themselves."""

from typing import Any

from hypothesis import strategies as st

from unbroken.config import Config, CurriculumPhase
from unbroken.config.document import SECTIONS, all_fields
from unbroken.config.fields import Field

LARGEST = 2**63 - 1

# Lone surrogates are in: a path that is no UTF-8 reaches Python with them.
TEXT = st.text(st.characters(exclude_characters="\0"), min_size=1).filter(lambda text: bool(text.strip()))
YAML_TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1).filter(
    lambda text: bool(text.strip())
)


def _value(field: Field, text: st.SearchStrategy[str]) -> st.SearchStrategy[Any]:
    said, shape = field.declaration, field.shape
    choices: list[st.SearchStrategy[Any]] = []
    if shape.words:
        choices.append(st.sampled_from(shape.words))
    if bool in shape.scalars:
        choices.append(st.booleans())
    if int in shape.scalars:
        # 1 is left out beside a switch: every first block is every block, and is written true.
        least = 2 if bool in shape.scalars else int(said.minimum or 0)
        choices.append(st.integers(least, LARGEST if said.maximum is None else int(said.maximum)))
    if float in shape.scalars:
        least_float = said.minimum if said.minimum is not None else said.above
        most = said.maximum if said.maximum is not None else said.below
        numbers = st.floats(
            min_value=least_float,
            max_value=most,
            allow_nan=False,
            allow_infinity=False,
            exclude_min=said.above is not None,
            exclude_max=said.below is not None,
        )
        choices.append(numbers)
    if str in shape.scalars:
        choices.append(text)
    if shape.is_curriculum:
        choices.append(st.lists(phases(text), min_size=1, max_size=3).map(tuple))
    if shape.optional:
        choices.append(st.none())
    return st.one_of(choices)


@st.composite
def phases(draw: st.DrawFn, text: st.SearchStrategy[str]) -> CurriculumPhase:
    """One phase with at least one weight above zero."""
    buckets = text.filter(lambda name: "/" not in name and name not in (".", ".."))
    weights = st.floats(0, 1e300, allow_nan=False)
    mix = draw(st.dictionaries(buckets, weights, min_size=1, max_size=4).filter(lambda mix: any(mix.values())))
    return CurriculumPhase(draw(st.integers(1, LARGEST)), tuple(sorted(mix.items())))


@st.composite
def configs(draw: st.DrawFn, text: st.SearchStrategy[str] = TEXT) -> Config:
    """A config that keeps every rule between fields."""
    values: dict[str, Any] = {name: draw(_value(field, text)) for name, field in all_fields().items()}
    n_head = draw(st.integers(1, 64))
    values["model.n_head"] = n_head
    values["model.n_embd"] = n_head * 2 * draw(st.integers(1, 64))
    values["model.n_kv_head"] = draw(st.sampled_from([n for n in range(1, n_head + 1) if n_head % n == 0] + [None]))
    values["model.n_positions"] = draw(st.integers(2, 10_000))
    values["data.max_length"] = draw(st.integers(2, values["model.n_positions"]))
    values["data.overlap_size"] = draw(st.integers(0, values["data.max_length"] // 2))
    values["training.max_steps"] = draw(st.integers(3, 10_000))
    values["optimizer.warmup_steps"] = draw(st.integers(0, values["training.max_steps"] - 2))
    values["optimizer.decay_steps"] = draw(
        st.none() | st.integers(1, values["training.max_steps"] - values["optimizer.warmup_steps"])
    )
    values["training.per_device_batch_size"] = draw(st.integers(1, 64))
    values["training.global_batch_size"] = draw(
        st.none() | st.integers(1, 64).map(lambda lanes: lanes * values["training.per_device_batch_size"])
    )
    values["model.n_layer"] = draw(st.integers(2, 100))
    values["training.gradient_checkpointing"] = draw(st.booleans() | st.integers(2, values["model.n_layer"]))
    measured = ["val_loss:min"] if values["training.eval_steps"] is not None else []
    values["training.keep_best"] = draw(st.sampled_from([None, "loss:max", *measured]))
    values["training.max_runtime_seconds"] = draw(st.none() | st.floats(100, 1e9))
    values["training.walltime_reserve_seconds"] = draw(st.none() | st.floats(0, 99))
    values["training.mirror"] = draw(st.sampled_from([None, "s3://bucket/runs/a", "file:///a/b, gs://bucket"]))
    values["training.trackers"] = draw(st.sampled_from([None, "tensorboard", "wandb:a, mlflow"]))
    is_alone = values["training.mirror"] is None and values["training.emergency_dir"] is None
    values["training.checkpoints"] = draw(st.sampled_from([None, "s3://bucket/runs/a"])) if is_alone else None
    if values["training.emergency_dir"] is None:
        values["training.persistent_dir"] = None
    return _built(values)


def _built(values: dict[str, Any]) -> Config:
    sections = {
        section: cls(**{name.partition(".")[2]: v for name, v in values.items() if name.startswith(f"{section}.")})
        for section, cls in SECTIONS.items()
    }
    return Config(**sections)
