"""A world whose ranks stand on nodes of their own, each with the metadata service of its own machine."""

import os
from typing import Any

import torch.distributed as dist

from tests.distributed.training_world import Job, train
from tests.e2e.clouds import loopback_only


def listen_and_train(job: Job, addresses: tuple[str, ...]) -> dict[str, Any]:
    """Train as the first process of a node that listens to the notices of its own machine."""
    os.environ |= {"LOCAL_RANK": "0", "UNBROKEN_SPOT": "aws", "UNBROKEN_SPOT_ADDRESS": addresses[dist.get_rank()]}
    with loopback_only() as went:
        results = train(job)
    return results | {"went": went}
