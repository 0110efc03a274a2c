"""The same bits on any number of ranks.

    exact.pin()                                             # deterministic kernels, recorded
    reducer = exact.Reducer(model, lanes=8, seed=0)         # a plain module, or one under fully_shard
    for step in range(total):
        for lane in reducer.lanes(step):                    # the lanes of this rank
            lane.backward(loss_of(model, batch(step, lane.number)))
        reducer.clip(1.0)                                   # gradients are summed over all lanes by now
        optimizer.step()

The global batch is a fixed list of lanes (micro-batches of fixed shape) on any number of ranks. Gradients are summed in
lane order, the norm does not depend on the sharding, and each lane has its own RNG seed.
"""

from unbroken.exact.lane_rng import lane_seed
from unbroken.exact.numerics import Numerics, pin
from unbroken.exact.reducer import Lane, Reducer

__all__ = ["Lane", "Numerics", "Reducer", "lane_seed", "pin"]
