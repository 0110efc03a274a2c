"""Two ranks, one of which ends before the other has answered its last vote; each is a process of its own."""

import os
import sys
import time

import torch.distributed as dist

from unbroken.world import Vote, World


class AtTheEnd:
    """Deleted when Python takes its modules apart: no other thread comes back from a wait then."""

    def __init__(self, vote: Vote) -> None:
        # The names of modules are gone by then.
        self.vote, self.write, self.read, self.sleep = vote, os.write, os.read, time.sleep

    def __del__(self) -> None:
        self.write(1, b"ending\n")
        self.read(0, 1)
        while not self.vote.is_answered():
            self.sleep(0.01)
        # For a thread that the answer wakes: it needs a moment to do damage.
        self.sleep(0.3)


def meet(directory: str, rank: int) -> None:
    """Vote, and leave without an answer or answer when told to."""
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=2)
    world = World.current()
    dist.destroy_process_group()
    if rank == 0:
        os.read(0, 1)
        os.write(1, b"%d\n" % world.any_rank(False))
        return
    globals()["at_the_end"] = AtTheEnd(world.start_vote([True]))
    world.close()


if __name__ == "__main__":
    meet(sys.argv[1], int(sys.argv[2]))
