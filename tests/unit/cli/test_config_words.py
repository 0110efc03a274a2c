"""CONFIG among other words: the two commands that take it so know their own options, and no list of them is kept."""

from collections.abc import Sequence

import click
import pytest

from unbroken.cli.arguments import allowance_overrides, config_path
from unbroken.cli.train import command as train
from unbroken.cli.validate import command as validate
from unbroken.errors import BadUsage


def complaint(command: click.Command, rest: Sequence[str], named: str | None = None) -> str:
    with click.Context(command), pytest.raises(BadUsage) as refused:
        config_path("unbroken x", rest, named, one="there is one")
    return refused.value.complaint


@pytest.mark.parametrize(
    ("command", "word", "meant"),
    [
        (train, "--acept=a", "; did you mean --accept?"),
        (train, "--nproc-per-nod", "; did you mean --nproc-per-node?"),
        (train, "--quite", "; did you mean --quiet?"),
        (train, "--hlep", "; did you mean --help?"),
        (train, "--skip-runtime-prob", ""),
        (validate, "--print-confi", "; did you mean --print-config?"),
        (validate, "--xyzzy", ""),
    ],
)
def test_an_unknown_option_is_reported_with_the_nearest_that_the_command_shows(
    command: click.Command, word: str, meant: str
) -> None:
    assert complaint(command, ["run.yaml", word]) == f"no such option: {word}{meant}"


def test_there_is_one_config() -> None:
    assert complaint(train, []) == "missing argument CONFIG"
    assert complaint(train, ["b"], "a") == "there is one; 'b' is neither an option nor section.field=value"
    assert str(config_path("unbroken x", ["-"], None, one="there is one")) == "-"
    assert str(config_path("unbroken x", [], "a", one="there is one")) == "a"


def test_allowed_changes_become_overrides_in_one_order() -> None:
    allowed = {"allow_budget_mismatch": True, "allow_bucket_exhaustion": True}
    assert allowance_overrides(allowed) == ["data.allow_bucket_exhaustion=true", "data.allow_budget_mismatch=true"]
    assert allowance_overrides({**allowed, "allow_budget_mismatch": False}) == ["data.allow_bucket_exhaustion=true"]
