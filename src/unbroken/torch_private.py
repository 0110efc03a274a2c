"""Every private name of torch that this package uses, each looked up here, with what happens where it is missing.

A private name may change its meaning or go away with any version of torch. So no other module imports one or reads an
attribute of a torch object that begins with an underscore, but for the dicts of ``nn.Module``. What can be answered by
a public name in some versions is answered by that name first. What a result depends on is tried out, not believed: see
``lone_holders``. Names that only a part of the package needs, such as those of FSDP2, are required by that part
(``require_custom_reduce_scatter``), so that the rest works without them.
"""

import datetime
import functools
import importlib
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

# Functions that a pickled tensor names: they are a part of torch's file format.
from torch._utils import _rebuild_tensor_v2 as rebuild_tensor_v2
from torch._utils import _rebuild_tensor_v3 as rebuild_tensor_v3

# The class that stock readers of distributed checkpoints find in ``.metadata``: it is a part of that format.
from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo
from torch.distributed.fsdp import FSDPModule

from unbroken.errors import TorchTooOld
from unbroken.tested_versions import minor_version

__all__ = [
    "ANNEALING",
    "COMPILED_CLASS",
    "COMPILED_INNER",
    "FSDP1_INNER",
    "INNER_SCHEDULES",
    "STATE_DICT_METADATA",
    "WORKER_LOOP",
    "AdamState",
    "DefaultReduceScatter",
    "FileStore",
    "PrefixStore",
    "ReduceScatter",
    "ShardedTensor",
    "StorageInfo",
    "Store",
    "adam_state",
    "can_set_timeout",
    "compute_policy",
    "default_cpu_group",
    "default_store",
    "empty_host_cache",
    "end_workers",
    "foreach_add_",
    "foreach_copy_",
    "foreach_mul_",
    "foreach_sub",
    "has_unreduced_gradients",
    "holders",
    "inductor_reads_environment",
    "is_fsdp_root",
    "is_set_up",
    "is_wrapper_subclass",
    "lone_holders",
    "param_groups",
    "rebuild_tensor_v2",
    "rebuild_tensor_v3",
    "reduce_scatter_of",
    "require_custom_reduce_scatter",
    "set_timeout",
    "unsharded_parameter",
    "update_mixed_precision",
    "watch_compiling",
    "worker_signals",
    "workers_of",
    "write_count",
]


def _found(module: str, name: str, otherwise: Any = None) -> Any:  # noqa: ANN401 - whatever has this name
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        return otherwise


class _Absent:
    """Stands for a type that this torch does not have: nothing is an instance of it."""


# ---- tensors ----

if TYPE_CHECKING:
    from torch.distributed._shard.sharded_tensor.api import ShardedTensor
else:
    # What FSDP1 gives out; it has no public name.
    ShardedTensor = _found("torch.distributed._shard.sharded_tensor", "ShardedTensor", _Absent)

# Applied to many tensors at once; torch's own optimizers are built on them.
foreach_add_, foreach_copy_ = torch._foreach_add_, torch._foreach_copy_
foreach_mul_, foreach_sub = torch._foreach_mul_, torch._foreach_sub

_is_traceable: Callable[[object], bool] | None = _found("torch.utils._python_dispatch", "is_traceable_wrapper_subclass")


def is_wrapper_subclass(tensor: torch.Tensor) -> bool:
    """Whether a tensor only wraps others that have the bytes."""
    if _is_traceable is not None:
        return _is_traceable(tensor)
    # The documented protocol of such a class.
    return hasattr(tensor, "__tensor_flatten__") and hasattr(tensor, "__tensor_unflatten__")


def write_count(tensor: torch.Tensor) -> int:
    """How often a tensor was written in place."""
    return int(tensor._version)


class AdamState(NamedTuple):
    """A parameter and what Adam keeps of it."""

    parameter: torch.Tensor
    gradient: torch.Tensor
    mean: torch.Tensor
    square: torch.Tensor
    step: torch.Tensor


def adam_state(optimizer: torch.optim.Adam, group: dict[str, Any]) -> list[AdamState]:
    """The state of all parameters of a group that have a gradient; made where there is none yet, as a step would."""
    parameters, gradients, means, squares, largest, steps = [list[torch.Tensor]() for _ in range(6)]
    held: Any = optimizer
    held._init_group(group, parameters, gradients, means, squares, largest, steps)
    return list(map(AdamState, parameters, gradients, means, squares, steps))


# What the schedule of averaged weights (``SWALR``) holds as its state before torch 2.9: one of its own functions.
ANNEALING: Mapping[str, Callable[[float], float]] = {
    name: getattr(torch.optim.swa_utils.SWALR, attribute)
    for name, attribute in (("cos", "_cosine_anneal"), ("linear", "_linear_anneal"))
    if hasattr(torch.optim.swa_utils.SWALR, attribute)
}


def is_set_up(optimizer: torch.optim.Optimizer) -> bool:
    """Whether ``torch.optim.Optimizer.__init__`` was called; one that only wraps another does not call it."""
    return hasattr(optimizer, "_optimizer_step_pre_hooks")


# ---- names of attributes that have no public one ----

# Under which FSDP1 and ``torch.compile`` keep the module that they wrap; ``DistributedDataParallel`` says ``module``.
FSDP1_INNER, COMPILED_INNER = "_fsdp_wrapped_module", "_orig_mod"
# The class that ``torch.compile`` makes of a module.
COMPILED_CLASS = "OptimizedModule"
# Where a module's state dict carries the versions of its modules, beside its entries; it is a part of torch's format.
STATE_DICT_METADATA = "_metadata"
# The schedules inside ``SequentialLR`` and ``ChainedScheduler``.
INNER_SCHEDULES = "_schedulers"
# What a worker of a loader runs.
WORKER_LOOP = "_worker_loop"


# ---- memory ----

_use_count: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)


def holders(tensor: torch.Tensor) -> int:
    """How many hold the memory of a tensor, and some more; ``lone_holders`` says how many more."""
    assert _use_count is not None
    storage = tensor.untyped_storage()
    # The count has all tensors, and the storage's own object once: who holds that object is counted by Python.
    return _use_count(storage._cdata) + sys.getrefcount(storage)


@functools.cache
def lone_holders() -> int | None:
    """The ``holders`` of a view that nobody else holds, besides the tensor it is a view of.

    None if the count cannot be relied on: one holder more, of any kind, must be counted, and no longer when it is gone.
    The number differs between versions of torch.
    """
    if _use_count is None:
        return None
    whole = torch.zeros(8, device="cpu")
    view = whole[:4]
    alone = holders(view)
    kinds: list[Callable[[], object]] = [
        lambda: view[1:2],
        lambda: whole[4:],
        view.detach,
        lambda: torch.nn.Parameter(view),
        view.numpy,
        view.untyped_storage,
        lambda: [view[:1], whole.view(2, 4)],
    ]
    for hold in kinds:
        held = hold()
        is_counted = holders(view) > alone
        del held
        if not is_counted or holders(view) != alone:
            return None
    return alone


def empty_host_cache() -> None:
    """Give freed pinned memory back to the system; does nothing where torch has no such function."""
    # Newer versions of torch have a public name.
    empty = _found("torch.accelerator", "empty_host_cache") or getattr(torch._C, "_host_emptyCache", None)
    if empty is not None:
        empty()


# ---- process groups ----

if TYPE_CHECKING:
    from torch._C._distributed_c10d import FileStore, PrefixStore, Store
else:
    # The public names, which have no types.
    FileStore, PrefixStore, Store = (getattr(dist, name, _Absent) for name in ("FileStore", "PrefixStore", "Store"))


def default_store() -> Store:
    """The store of the default process group, which all its ranks reach."""
    # There is no public name for it.
    store: Store = dist.distributed_c10d._get_default_store()
    return store


def default_cpu_group() -> Any:  # noqa: ANN401 - the type of a backend is not public
    """The backend of the default process group for tensors on the CPU."""
    return dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))


def can_set_timeout() -> bool:
    """Whether ``set_timeout`` has an effect on a gloo group that is connected.

    In torch 2.8 it has none: an exchange still ends after the timeout that the group was made with. Seen to work in
    torch 2.13; what lies between was not tried.
    """
    return tuple(map(int, minor_version(torch.__version__).split("."))) >= (2, 13)


def set_timeout(group: Any, timeout_s: float) -> None:  # noqa: ANN401
    """Let an exchange over a backend take so long."""
    # Raises where it is missing: with the short timeout of a first connection, later exchanges would end too soon.
    group._set_default_timeout(datetime.timedelta(seconds=timeout_s))


# ---- workers of data loaders ----


def worker_signals() -> ModuleType | None:
    """The module in which torch's loaders watch their workers; None if it is not as it is known here."""
    try:
        module = importlib.import_module("torch.utils.data._utils.signal_handling")
    except ImportError:
        return None
    known = ("_error_if_any_worker_fails", "_set_worker_signal_handlers")
    return module if all(callable(getattr(module, name, None)) for name in known) else None


def workers_of(iterator: object) -> tuple[Any, ...]:
    """The worker processes of a loader's iterator."""
    return tuple(getattr(iterator, "_workers", ()))


def end_workers(loader: object) -> bool:
    """End the workers that a loader keeps from epoch to epoch; False if it keeps none."""
    held: Any = loader
    kept = getattr(held, "_iterator", None)
    end = getattr(kept, "_shutdown_workers", None)
    # Another loader may have an attribute of this name for something else.
    if kept is None or not (callable(end) or isinstance(held, torch.utils.data.DataLoader)):
        return False
    if callable(end):
        end()
    held._iterator = None
    return True


# ---- the compiler ----


def inductor_reads_environment() -> bool:
    """Whether inductor is deterministic by ``TORCHINDUCTOR_DETERMINISTIC=1`` alone, read when it is loaded.

    Read in the source of torch 2.13; older versions are told by ``torch.use_deterministic_algorithms``.
    """
    return tuple(map(int, minor_version(torch.__version__).split("."))) >= (2, 13)


def watch_compiling(begins: Callable[[], None], ends: Callable[[], None]) -> Callable[[], None]:
    """Call functions before and after everything that is compiled; returns what ends that.

    Where torch cannot tell, neither is called.
    """
    handler = _found("torch._dynamo.callback", "callback_handler")
    known = ("register_start_callback", "register_end_callback", "remove_start_callback", "remove_end_callback")
    if not all(callable(getattr(handler, name, None)) for name in known):
        return lambda: None

    # They are told what is compiled, in newer versions.
    def begin(*_: object) -> None:
        begins()

    def end(*_: object) -> None:
        ends()

    handler.register_start_callback(begin)
    handler.register_end_callback(end)

    def stop() -> None:
        handler.remove_start_callback(begin)
        handler.remove_end_callback(end)

    return stop


# ---- FSDP2 ----

if TYPE_CHECKING:
    from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter
else:
    _FSDP2 = "torch.distributed.fsdp._fully_shard"
    ReduceScatter = _found(f"{_FSDP2}._fsdp_api", "ReduceScatter", _Absent)
    DefaultReduceScatter = _found(f"{_FSDP2}._fsdp_collectives", "DefaultReduceScatter", _Absent)


def require_custom_reduce_scatter() -> None:
    """Raise unless FSDP2 can be given another reduce-scatter.

    Raises:
        TorchTooOld: it cannot.
    """
    needed = ("set_custom_reduce_scatter", "set_gradient_divide_factor", "set_force_sum_reduction_for_comms")
    has_types = not (issubclass(ReduceScatter, _Absent) or issubclass(DefaultReduceScatter, _Absent))
    if not has_types or not all(hasattr(FSDPModule, name) for name in needed):
        why = "older versions cannot replace FSDP2's reduce-scatter, which adds in an order of its own"
        raise TorchTooOld(feature="exact under FSDP2", required="2.9", installed=str(torch.__version__), reason=why)


def compute_policy(module: FSDPModule) -> Any:  # noqa: ANN401 - FSDP2's own type
    """The mixed precision policy of a module under FSDP2."""
    return _state(module)._mp_policy


def is_fsdp_root(module: FSDPModule) -> bool:
    """Whether a module is the outermost one under FSDP2."""
    return bool(_state(module)._is_root)


def param_groups(module: FSDPModule) -> list[Any]:
    """The groups of parameters that FSDP2 gathers and reduces at once, of one module."""
    state = _state(module)
    found = getattr(state, "_fsdp_param_groups", None)
    # In older versions of torch a module has one group, or None.
    return list(found) if found is not None else [each for each in (state._fsdp_param_group,) if each is not None]


def reduce_scatter_of(group: Any) -> ReduceScatter:  # noqa: ANN401
    """The reduce-scatter of a group."""
    found: ReduceScatter = group._reduce_scatter_comm
    return found


def unsharded_parameter(parameter: Any) -> Any:  # noqa: ANN401
    """The whole parameter behind a sharded one; None before the first forward pass."""
    return getattr(parameter, "_unsharded_param", None)


def has_unreduced_gradients(module: torch.nn.Module) -> bool:
    """Whether FSDP2 keeps gradients that it has not reduced yet, behind parameters that show none."""
    shards = (
        each
        for part in module.modules()
        if isinstance(part, FSDPModule)
        for group in param_groups(part)
        for each in group.fsdp_params
    )
    return any(
        getattr(each, "unsharded_accumulated_grad", None) is not None
        or getattr(unsharded_parameter(each), "grad", None) is not None
        for each in shards
    )


def update_mixed_precision(group: Any) -> None:  # noqa: ANN401
    """Let a group read the policies of its parameters anew; before the first forward pass it has not read them yet."""
    if "_reduce_dtype" in vars(group):
        group._init_mp_dtypes()
        for parameter in group.fsdp_params:
            whole = unsharded_parameter(parameter)
            if whole is not None:
                whole.grad_dtype = parameter.unsharded_grad_dtype


def _state(module: Any) -> Any:  # noqa: ANN401
    return module._get_fsdp_state()
