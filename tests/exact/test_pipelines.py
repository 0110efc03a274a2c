"""Pipelines of torchdata, datasets and Grain: killed at any batch, they give the samples of the run that nobody killed.

The table of docs/loaders.md is made of these. ``UNBROKEN_WRITE_DOCS=1`` writes it anew.
"""

import importlib.metadata
import random
from pathlib import Path

import pytest

from tests.exact.forks import forked_each
from tests.exact.orders import Order, epochs_in, served_in
from tests.exact.pipelines import ALL, GRAIN, HUGGING_FACE, NODES, Pipeline, serve
from tests.exact.test_loaders import require_table
from unbroken.testing.worlds import preload

preload("tests.exact.pipelines")
LIBRARIES = {"datasets": HUGGING_FACE, "torchdata": NODES, "grain": GRAIN}
HEAD = """\
| pipeline | workers | exact | how it resumes |
|---|---|---|---|
"""


def deaths(pipeline: Pipeline, workers: int, epochs: list[int]) -> list[int]:
    """A batch by chance, the last of the first epoch, the first of the second and one by chance behind it."""
    chance = random.Random(pipeline.name)
    second = epochs.index(1) + 1 if 1 in epochs else pipeline.total // 2
    found = [chance.randrange(2, second - 1), second - 1, second, chance.randrange(second + 1, pipeline.total)]
    # Each worker of Grain imports all that the program does.
    return found[:1] if workers and pipeline in GRAIN else found


@pytest.mark.promise("C13", "U10")
@pytest.mark.parametrize("library", LIBRARIES)
def test_a_killed_pipeline_gives_the_samples_of_one_run_in_their_order(library: str, tmp_path: Path) -> None:
    rows = [
        (number, workers) for number, each in enumerate(ALL) for workers in each.workers if each in LIBRARIES[library]
    ]
    plain = [
        (number, Order(str(tmp_path / f"{number}-{workers}-plain"), ALL[number].name, workers, total=ALL[number].total))
        for number, workers in rows
    ]
    said = [each.required()[1] for each in forked_each(serve, plain)]
    ends = [deaths(ALL[number], order.workers, epochs_in(order.directory)) for number, order in plain]
    killed = [str(tmp_path / f"{number}-{workers}-killed") for number, workers in rows]

    def order(at: int, death: int | None) -> tuple[int, Order]:
        number, workers = rows[at]
        return number, Order(killed[at], ALL[number].name, workers, death, ALL[number].total)

    for job in range(4):
        orders = [order(at, each[job]) for at, each in enumerate(ends) if job < len(each)]
        left = [
            (each, ended.error)
            for each, ended in zip(orders, forked_each(serve, orders), strict=True)
            if not ended.is_killed
        ]
        assert not left, f"job {job + 1}: {left}"
    last = forked_each(serve, [order(at, None) for at in range(len(rows))])
    assert [each.required()[0] for each in last] == [each[-1] - 1 for each in ends]
    table = []
    for (number, whole_order), path, died, notices in zip(plain, killed, ends, said, strict=True):
        pipeline, whole = ALL[number], served_in(whole_order.directory)
        expected, at = [], 0
        for death in (*died, pipeline.total):
            expected += whole[at:death]
            at = death - 1
        assert served_in(path) == expected, (pipeline.name, whole_order.workers)
        require_reshuffled(pipeline, whole_order)
        assert not any("not exact" in line for line in notices)
        exact = "yes, unless functions draw random numbers" if any("unless" in line for line in notices) else "yes"
        table.append(f"| {pipeline.name} | {whole_order.workers} | {exact} | {pipeline.way} |\n")
    tested = f"Tested with {library} {importlib.metadata.version(library)}.\n\n"
    require_table(f"<!-- {library}: begin -->\n", tested + HEAD + "".join(table), f"<!-- {library}: end -->\n")


def require_reshuffled(pipeline: Pipeline, order: Order) -> None:
    """No two epochs have the same order, where the loader is to shuffle."""
    by_epoch: dict[int, list[int]] = {}
    for (_, ids), epoch in zip(served_in(order.directory), epochs_in(order.directory), strict=True):
        by_epoch.setdefault(epoch, []).extend(ids)
    if pipeline.is_reshuffled:
        assert by_epoch[0] != by_epoch[1], pipeline.name
