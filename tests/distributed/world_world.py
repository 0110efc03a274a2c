"""What the ranks run that show how a ``World`` speaks."""

import threading
from collections.abc import Callable

import torch
import torch.distributed as dist

from unbroken.errors import Bug, NotAnItem, RankFailed, UnbrokenError
from unbroken.world import World


def refuse(rank: int) -> int:
    """Fail on one rank."""
    if dist.get_rank() == rank:
        raise NotAnItem(name=f"of rank {rank}", type_name="T", lacks="everything")
    return dist.get_rank()


def stumble(rank: int) -> int:
    """Fail on one rank with an error that is not ours."""
    if dist.get_rank() == rank:
        raise ZeroDivisionError("by zero")
    return dist.get_rank()


def met(action: Callable[[], object]) -> tuple[str, int | None, str | None]:
    """The error's type, the rank it names, the kind of its cause."""
    try:
        action()
    except RankFailed as failed:
        return "RankFailed", failed.rank, failed.cause.kind
    except (UnbrokenError, ZeroDivisionError) as error:
        return type(error).__name__, None, None
    return "nothing", None, None


def speak() -> dict[str, object]:
    """Everything a world can be asked, once."""
    world = World.current()
    rank = world.rank

    def all_fail() -> None:
        raise NotAnItem(name=str(rank), type_name="T", lacks="x") if rank else Bug(cause="first")

    results: dict[str, object] = {
        "who": (rank, world.size, world.is_first),
        "gathered": world.all_gather({"rank": rank}),
        "heard": world.broadcast(f"rank {rank}"),
        "to the first": world.gather("x" * 10_000 * rank),
        "scattered": world.scatter([f"for rank {each}" for each in range(world.size)] if world.is_first else ()),
        "differing": world.differing([bytes(16), bytes([rank // 2] * 16), bytes(15) + bytes([255 * (rank == 1)])]),
        "any": (world.any_rank(rank == 2), world.any_rank(False)),
        "told the first": world.gather_to_first(lambda: rank * 3),
        "one fails the first": met(lambda: world.gather_to_first(lambda: refuse(1))),
        "sum": world.add_up(torch.tensor([rank, 2**62])).tolist(),
        "all": world.all_or_none(lambda: rank * 2),
        "first": world.from_first(lambda: rank + 7),
        "one fails": met(lambda: world.all_or_none(lambda: refuse(1))),
        "one stumbles": met(lambda: world.all_or_none(lambda: stumble(2))),
        "the first refuses": met(lambda: world.from_first(lambda: refuse(0))),
        "the first stumbles": met(lambda: world.from_first(lambda: stumble(0))),
        "others do not decide": world.from_first(lambda: refuse(1)),
        "all fail": met(lambda: world.all_or_none(all_fail)),
    }
    results |= votes(world) | beside(world)
    # After every failure the ranks are still in step.
    results["still"] = world.all_gather(rank)
    return results


def votes(world: World) -> dict[str, object]:
    """Two votes on their way at once, and another exchange between them."""
    early = world.start_vote([world.rank == 1, False, True])
    late = world.start_vote([False, world.rank == 2, False])
    between = world.all_gather(world.rank)
    return {"late": late.read(), "early": early.read(), "between": between}


def beside(world: World) -> dict[str, object]:
    """A thread that speaks over a group of its own, in its own order, while the main one does."""
    other = world.beside()
    found: list[object] = []

    def talk() -> None:
        found.extend(other.all_gather((number, other.rank)) for number in range(20))

    thread = threading.Thread(target=talk)
    thread.start()
    said = [world.all_gather(number) for number in range(20)]
    thread.join()
    return {"beside": found, "main": said}


def alone() -> dict[str, object]:
    """A world of one has no group and answers itself."""
    world = World.current()
    return {
        "group": world.link is None,
        "gathered": world.all_gather(1),
        "to the first": world.gather(2),
        "scattered": world.scatter([3]),
        "differing": world.differing([bytes(16)]),
        "vote": world.start_vote([True, False]).read(),
        "beside": world.beside() is world,
        "fails": met(lambda: world.all_or_none(lambda: refuse(0))),
    }
