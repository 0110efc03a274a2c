"""``unbroken explain``: documentation of errors, exit codes and config fields, offline."""

from importlib import resources
from importlib.resources.abc import Traversable

import click
from click.shell_completion import CompletionItem

from unbroken.cli.output import Output, as_command
from unbroken.errors import UnknownTopic
from unbroken.report.style import Style
from unbroken.report.table import Column, table

_SUFFIX = ".md"


def error_pages() -> dict[str, str]:
    """The pages of errors, by kind."""
    return _pages("errors")


def finding_pages() -> dict[str, str]:
    """The pages of findings of ``unbroken doctor`` that are no errors, by kind."""
    return _pages("findings")


def general_pages() -> dict[str, str]:
    """The pages on general topics, by name."""
    return _pages("topics")


def _pages(folder: str) -> dict[str, str]:
    place: Traversable = resources.files("unbroken") / "pages" / folder
    pages = sorted((page for page in place.iterdir() if page.name.endswith(_SUFFIX)), key=lambda page: page.name)
    return {page.name.removesuffix(_SUFFIX): page.read_text(encoding="utf-8") for page in pages}


def find(topic: str) -> tuple[str, str]:
    """The type of a topic (``error``, ``finding``, ``page`` or ``config``) and its text.

    Raises:
        UnknownTopic: there is no such topic; similar ones are suggested.
    """
    # An error's headline can be pasted as it is printed: error[torn-checkpoint].
    name = topic.removeprefix("error[").removesuffix(":").removesuffix("]")
    if (page := error_pages().get(name)) is not None:
        return "error", page
    if (page := finding_pages().get(name)) is not None:
        return "finding", page
    if (page := general_pages().get(name)) is not None:
        return "page", page
    # Imported here: the page of an error does not need it.
    from unbroken.config import guide

    if (text := guide.explain(name)) is not None:
        return "config", text
    from unbroken.cli.group import nearest

    raise UnknownTopic(topic=topic, nearest=nearest(name, all_topics()))


def all_topics() -> list[str]:
    """All topics, errors first."""
    from unbroken.config import guide

    return [*error_pages(), *finding_pages(), *general_pages(), *guide.topics()]


def _complete_topic(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    return [CompletionItem(topic) for topic in all_topics() if topic.startswith(incomplete)]


@as_command(
    "explain",
    examples=(
        ("unbroken explain", "list all topics"),
        ("unbroken explain torn-checkpoint", "an error"),
        ("unbroken explain exit-codes", "all exit codes"),
        ("unbroken explain optimizer.learning_rate", "a config field"),
    ),
)
@click.argument("topic", required=False, shell_complete=_complete_topic)
def command(output: Output, topic: str | None) -> None:
    """Explain an error, an exit code or a config field.

    TOPIC is the kind of an error (torn-checkpoint) or of a finding of `unbroken doctor` (no-hard-links), a config field
    (optimizer.learning_rate), a config section (optimizer) or a page (exit-codes). Without TOPIC, lists all topics.
    """
    if topic is None:
        _list_topics(output)
        return
    about, text = find(topic)
    output.document(
        "unbroken.explain/1",
        {"topic": topic, "about": about, "text": text},
        lambda: _readable(text, output.style),
    )


def _list_topics(output: Output) -> None:
    from unbroken.config import guide

    errors, findings, general, names = error_pages(), finding_pages(), general_pages(), guide.topics()
    fields = {"errors": list(errors), "findings": list(findings), "pages": list(general), "config": names}

    def text() -> str:
        style = output.style
        columns = [Column("topic"), Column("about")]
        rows = [(name, meaning(page)) for name, page in {**general, **errors, **findings}.items()]
        config_lines = "\n".join(_in_columns(names))
        return f"{table(columns, rows, style=style)}\n\n{style.dim('config')}\n{config_lines}"

    output.document("unbroken.topics/1", fields, text)


def meaning(page: str) -> str:
    """The summary of a page: the first sentence of its first paragraph."""
    paragraph = page.split("\n\n")[1]
    return " ".join(paragraph.split()).split(". ")[0].removesuffix(".")


def _in_columns(names: list[str], *, columns: int = 2) -> list[str]:
    wide = max(map(len, names), default=0)
    rows = -(-len(names) // columns)
    return ["  ".join(f"{name:<{wide}}" for name in names[row::rows]).rstrip() for row in range(rows)]


def _readable(page: str, style: Style) -> str:
    """A page for a terminal: headings in bold, without the marks."""
    lines = page.rstrip().splitlines()
    return "\n".join(style.bold(line.lstrip("#").strip()) if line.startswith("#") else line for line in lines)
