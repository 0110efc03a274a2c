"""The text of ``unbroken explain`` for the config, a section or a field, generated from the declarations."""

import sys
import textwrap
from collections.abc import Iterator, Sequence
from typing import Final

from unbroken.config.commented import as_yaml, heading_of
from unbroken.config.document import SECTIONS, Config, all_fields
from unbroken.config.fields import Field, ResumeClass
from unbroken.config.presets import PRESETS
from unbroken.quoting.shell import for_shell

_WIDTH: Final = 100


def topics() -> list[str]:
    """All topics: ``config``, the sections, the fields."""
    return ["config", *SECTIONS, *all_fields()]


def explain(topic: str) -> str | None:
    """The text of a topic; None if it is not a topic of the config."""
    if topic == "config":
        return _explain_config()
    if topic in SECTIONS:
        return _explain_section(topic)
    field = all_fields().get(topic)
    return None if field is None else _explain_field(field)


def default_text(field: Field) -> str:
    """A field's default as YAML."""
    return as_yaml(Config().values()[field.section][field.name])


def _explain_field(field: Field) -> str:
    said = field.declaration
    pairs = [("type", str(field.shape))]
    if field.bounds:
        pairs.append(("bounds", field.bounds))
    pairs.append(("default", default_text(field)))
    if said.null_means:
        pairs.append(("null", said.null_means))
    pairs.append(("resume", f"{said.resume.value}: {said.resume.rule}"))
    shown = said.example if field.default is None else default_text(field)
    text = shown if isinstance(shown, str) else as_yaml(shown)
    pairs.append(("write", f"{field.name}: {text}   in the section {field.section}, or"))
    pairs.append(("", f"--{field.dotted} {for_shell(text)}"))
    return "\n".join([f"# {field.dotted}", "", said.meaning, "", *_aligned(pairs)])


def _explain_section(section: str) -> str:
    fields = [field for field in all_fields().values() if field.section == section]
    wide = max(len(field.name) for field in fields)
    defaults = max(len(default_text(field)) for field in fields)
    lines = [f"# {section}", "", heading_of(section), ""]
    for field in fields:
        start = f"  {field.name:<{wide}}  {default_text(field):<{defaults}}  {field.declaration.resume.value:<8}  "
        first, *more = textwrap.wrap(field.declaration.meaning, max(40, 120 - len(start)))
        lines += [start + first, *(" " * len(start) + line for line in more)]
    lines += ["", "Columns: field, default, resume class, meaning."]
    return "\n".join([*lines, f"unbroken explain {section}.{fields[0].name} explains one field."])


def _explain_config() -> str:
    sections = [(section, heading_of(section)) for section in SECTIONS]
    classes = [(resume.value, resume.rule) for resume in ResumeClass]
    return "\n".join(
        [
            "# config",
            "",
            "One YAML or JSON file with four sections; a field that is not set has its default.",
            "",
            *_aligned(sections),
            "",
            "## Overrides",
            "",
            "Any field, after the file: --section.field value, --section.field=value, section.field=value.",
            "",
            "## Presets",
            "",
            "unbroken init --preset NAME writes a commented file.",
            "",
            *_aligned(list(PRESETS.items())),
            "",
            "## Resume classes",
            "",
            "What happens when a job resumes a run with a different value:",
            "",
            *_aligned(classes),
        ]
    )


def _aligned(pairs: Sequence[tuple[str, str]]) -> Iterator[str]:
    wide = max(len(label) for label, _ in pairs)
    for label, text in pairs:
        indent = " " * (wide + 4)
        lines = textwrap.wrap(text, _WIDTH - wide - 4, break_long_words=False, break_on_hyphens=False)
        yield f"  {label:<{wide}}  {lines[0]}"
        yield from (indent + line for line in lines[1:])


# ---- the reference page ----

_OPENING = """# Config reference

Generated from the field declarations by `python -m unbroken.config.guide`.

A config is one YAML or JSON file with the sections `model`, `data`, `optimizer` and `training`. A field that is not
set has its default. Unknown names, values of the wrong type and values out of bounds are errors; all of them are
reported at once, with line numbers. The type of the field decides how a value is read: `3e-4` and `1e3` are numbers,
`5_000_000_000` is a whole number, `yes`, `no`, `on` and `off` are booleans only in boolean fields, and a number in
quotes is text.

```sh
unbroken init --preset tiny -o run.yaml
unbroken validate run.yaml
unbroken validate run.yaml --print-config --optimizer.learning_rate 1e-4 training.max_steps=50
unbroken explain optimizer.learning_rate
```

Any field can be overridden after the file, as `--section.field value`, `--section.field=value` or
`section.field=value`.
"""


def reference() -> str:
    """The reference page, docs/config.md."""
    return "\n".join(_parts())


def _parts() -> Iterator[str]:
    yield _OPENING
    yield "## Resume classes\n"
    yield "What happens when a job resumes a run with a different value:\n"
    yield from (f"- **{resume.value}**: {resume.rule}." for resume in ResumeClass)
    yield "\n## Presets\n"
    yield from (f"- `{name}`: {about}." for name, about in PRESETS.items())
    for section in SECTIONS:
        yield f"\n## `{section}`\n\n{heading_of(section)}\n"
        yield "| field | type | default | resume | meaning |\n|---|---|---|---|---|"
        yield from (_row(field) for field in all_fields().values() if field.section == section)
    yield ""


def _row(field: Field) -> str:
    said = field.declaration
    kind = f"{field.shape}; {field.bounds}" if field.bounds else str(field.shape)
    meaning = f"{said.meaning} Null: {said.null_means}." if said.null_means else said.meaning
    return f"| `{field.name}` | {kind} | `{default_text(field)}` | {said.resume.value} | {meaning} |"


if __name__ == "__main__":
    sys.stdout.write(reference())
