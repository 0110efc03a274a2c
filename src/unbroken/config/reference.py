"""The reference page of all config fields, as Markdown: ``python -m unbroken.config.reference > docs/config.md``."""

import sys
from collections.abc import Iterator

from unbroken.config.commented import heading_of
from unbroken.config.document import SECTIONS, all_fields
from unbroken.config.fields import Field, ResumeClass
from unbroken.config.guide import default_text
from unbroken.config.presets import PRESETS

_OPENING = """# Config reference

This page is made from the field declarations by `python -m unbroken.config.reference`.

A config is one YAML or JSON file with the sections `model`, `data`, `optimizer` and `training`. A field that is left
out takes its default. Unknown names, values of the wrong type and values out of bounds are errors; all of them are
reported at once, with their lines. The field's type decides what a text means: `3e-4` and `1e3` are numbers where a
number is expected, `5_000_000_000` is a whole number, `yes`, `no`, `on` and `off` are switches only where a switch is
expected, and a number in quotes is text.

```sh
unbroken init --preset tiny -o run.yaml
unbroken validate run.yaml
unbroken validate run.yaml --print-config --optimizer.learning_rate 1e-4 training.max_steps=50
unbroken explain optimizer.learning_rate
```

Every field can be overridden after the file, as `--section.field value`, `--section.field=value` or
`section.field=value`.
"""


def reference() -> str:
    """The page."""
    return "\n".join(_parts())


def _parts() -> Iterator[str]:
    yield _OPENING
    yield "## Resume classes\n"
    yield "What happens when a job resumes a run with another value than the run was started with:\n"
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
