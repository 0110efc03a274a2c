"""``unbroken explain``: the pages that come with the package, and every config field, without a network."""

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
    """Every error kind that has a page, with the page's text."""
    return _pages("errors")


def general_pages() -> dict[str, str]:
    """The pages that are about no single error."""
    return _pages("topics")


def _pages(folder: str) -> dict[str, str]:
    place: Traversable = resources.files("unbroken") / "pages" / folder
    pages = sorted((page for page in place.iterdir() if page.name.endswith(_SUFFIX)), key=lambda page: page.name)
    return {page.name.removesuffix(_SUFFIX): page.read_text(encoding="utf-8") for page in pages}


def find(topic: str) -> tuple[str, str]:
    """What a topic is about (``error``, ``page`` or ``config``) and its text.

    Raises:
        UnknownTopic: there is no such topic; the nearest ones are named.
    """
    # An error's headline can be pasted as it is printed: error[torn-checkpoint].
    name = topic.removeprefix("error[").removesuffix(":").removesuffix("]")
    if (page := error_pages().get(name)) is not None:
        return "error", page
    if (page := general_pages().get(name)) is not None:
        return "page", page
    # Loaded here: an error's page needs no config.
    from unbroken.config import guide

    if (text := guide.explain(name)) is not None:
        return "config", text
    from unbroken.cli.group import nearest

    raise UnknownTopic(topic=topic, nearest=nearest(name, all_topics()))


def all_topics() -> list[str]:
    """Every topic, errors first."""
    from unbroken.config import guide

    return [*error_pages(), *general_pages(), *guide.topics()]


def _complete_topic(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    return [CompletionItem(topic) for topic in all_topics() if topic.startswith(incomplete)]


@as_command("explain")
@click.argument("topic", required=False, shell_complete=_complete_topic)
def command(output: Output, topic: str | None) -> None:
    """Explain an error, a config field or a section.

    TOPIC is an error's kind (torn-checkpoint), a config field (optimizer.learning_rate), a section (optimizer) or a
    page (exit-codes). Without one, all topics are listed.
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

    errors, general, fields = error_pages(), general_pages(), guide.topics()
    facts = {"errors": list(errors), "pages": list(general), "config": fields}

    def text() -> str:
        style = output.style
        columns = [Column("topic"), Column("about")]
        rows = [(name, meaning(page)) for name, page in {**general, **errors}.items()]
        config_lines = "\n".join(_in_columns(fields))
        return f"{table(columns, rows, style=style)}\n\n{style.dim('config')}\n{config_lines}"

    output.document("unbroken.topics/1", facts, text)


def meaning(page: str) -> str:
    """A page's own summary: its first paragraph's first sentence."""
    paragraph = page.split("\n\n")[1]
    return " ".join(paragraph.split()).split(". ")[0].removesuffix(".")


def _in_columns(names: list[str], *, columns: int = 2) -> list[str]:
    wide = max(map(len, names), default=0)
    rows = -(-len(names) // columns)
    return ["  ".join(f"{name:<{wide}}" for name in names[row::rows]).rstrip() for row in range(rows)]


def _readable(page: str, style: Style) -> str:
    """A page as a terminal shows it: headings stand out, their marks are gone."""
    lines = page.rstrip().splitlines()
    return "\n".join(style.bold(line.lstrip("#").strip()) if line.startswith("#") else line for line in lines)
