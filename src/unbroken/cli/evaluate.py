"""``unbroken evaluate``: validation loss and perplexity of a checkpoint."""

import math
from dataclasses import replace
from typing import Any

import click

from unbroken.cli.model_options import device_option, ema_option, note_skipped, skipped_fields
from unbroken.cli.output import Output, as_command
from unbroken.quoting import amounts


@as_command(
    "evaluate",
    examples=(
        ("unbroken evaluate runs/a", "the newest usable checkpoint"),
        ("unbroken evaluate runs/a@1000 --max-eval-batches 100", "step 1,000, on 100 batches"),
    ),
)
@click.argument("reference", metavar="RUN[@STEP]")
@click.option("--data-path", metavar="DIR", help="Data directory with val/; default: data.path of the run.")
@click.option(
    "--max-eval-batches", type=click.IntRange(1), metavar="N", help="Maximum number of batches; default: all of val/."
)
@click.option("--batch-size", type=click.IntRange(1), metavar="N", help="Sequences per batch; default: as in training.")
@ema_option
@device_option
def command(
    output: Output,
    reference: str,
    data_path: str | None,
    max_eval_batches: int | None,
    batch_size: int | None,
    ema: bool,
    device: str | None,
) -> None:
    """Compute the validation loss of a checkpoint.

    Evaluates on val/ of the run's data. RUN alone is its newest usable checkpoint. Changes nothing.
    """
    from unbroken.gpt.checkpoint import find_model
    from unbroken.gpt.device import RankDevice, chosen_device
    from unbroken.gpt.evaluate import Evaluation
    from unbroken.gpt.training_data import validation_stream
    from unbroken.world import World

    chosen = chosen_device(device)
    source = find_model(reference, is_averaged=ema)
    note_skipped(output, source)
    loaded = source.load(chosen)
    note_skipped(output, loaded.found, before=source)
    config = loaded.config
    if data_path is not None:
        config = replace(config, data=replace(config.data, path=data_path))
    lane = batch_size or config.training.per_device_batch_size
    evaluation = Evaluation(validation_stream(config), lane, max_eval_batches, RankDevice(World(0, 1), chosen))
    found = evaluation(loaded.model)
    fields: dict[str, Any] = {
        "run": str(loaded.run),
        "checkpoint": loaded.name,
        "step": loaded.step,
        "is_averaged": ema,
        "skipped_checkpoints": skipped_fields(loaded.found),
        # JSON has no NaN.
        "val_loss": found.loss if math.isfinite(found.loss) else None,
        "perplexity": found.perplexity if math.isfinite(found.perplexity) else None,
        "tokens": found.tokens,
    }

    def text() -> str:
        return "\n".join(
            [
                f"checkpoint  {loaded.run}  {loaded.name}{'  EMA weights' if ema else ''}",
                f"val_loss    {found.loss:.4f}",
                f"perplexity  {found.perplexity:.2f}",
                f"tokens      {amounts.count(found.tokens)}",
            ]
        )

    output.document("unbroken.evaluate/2", fields, text)
