"""The parser's complaints in the house's words."""

import click

from unbroken.errors import BadUsage


def as_bad_usage(complaint: click.ClickException) -> BadUsage:
    """What click says about a command line, as an error of ours."""
    ctx = getattr(complaint, "ctx", None)
    command = ctx.command_path if isinstance(ctx, click.Context) else "unbroken"
    return BadUsage(command=command, complaint=_worded(complaint))


def _worded(complaint: click.ClickException) -> str:
    if isinstance(complaint, click.NoSuchOption):
        meant = f"; did you mean {' or '.join(complaint.possibilities)}?" if complaint.possibilities else ""
        return f"there is no option '{complaint.option_name}'{meant}"
    if isinstance(complaint, click.MissingParameter) and complaint.param is not None:
        if isinstance(complaint.param, click.Argument):
            return f"the argument {complaint.param.human_readable_name} is missing"
        return f"the option {complaint.param.opts[0]} is missing"
    message = " ".join(complaint.format_message().split()).removesuffix(".")
    # A number's type is named by its bounds, which is no word that a person would use.
    message = message.replace("is not a valid integer range", "is no whole number")
    message = message.replace("is not a valid float range", "is no number")
    return message[:1].lower() + message[1:]
