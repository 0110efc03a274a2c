"""Gradients that stand at a step's edge after their optimizer has stepped, and whether the next step still uses them.

Most loops leave gradients standing and drop them by the next ``zero_grad``: a checkpoint without them is exact. A loop
that steps before its backward pass, never zeroes, or zeroes in place uses the very same tensors again. That is seen at
the optimizer's next step: then the gradient of a parameter is the object that stood at the edge. The tensors are held
weakly, for a loop that drops them frees their memory.

All of them are looked at in the first steps and after each save, one parameter in every other step. As long as it is
not known what a loop does, saves contain the gradients that stand.
"""

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

import torch
import torch.distributed as dist

from unbroken import torch_private
from unbroken.errors import NotExact, TensorUnsupported
from unbroken.state.items import GradientsItem, OptimizerItem
from unbroken.state.naming import is_flat_sharded
from unbroken.state.pieces import local_tensors, require_supported
from unbroken.state.stage import Handle

# At so many edges after a step all gradients of an optimizer are looked at.
_FIRST_LOOKS: Final = 3
_ALL: Final = "all"

Versions = list[tuple["weakref.ref[torch.Tensor]", int]]


def _hook(parameter: torch.Tensor, called: Callable[[torch.Tensor], None]) -> Handle:
    register: Callable[[Callable[[torch.Tensor], None]], Handle] = parameter.register_hook
    return register(called)


def _hook_after(parameter: torch.Tensor, called: Callable[[torch.Tensor], None]) -> Handle:
    register: Callable[[Callable[[torch.Tensor], None]], Handle] = parameter.register_post_accumulate_grad_hook
    return register(called)


class _Look:
    """The gradients that stood at one edge, until their optimizer steps.

    Where the same tensor stands then, it was kept, or somebody put it back: buckets of DDP do, and they are exchanged
    for others too, with what is in them. A hook tells: it is called whenever a gradient arrives, before it is added.
    ``autograd.grad`` calls it too, but adds nothing: a loop that assigns the result has dropped what stood.
    """

    def __init__(self, parameters: Iterable[torch.Tensor], *, is_hooked: bool = False) -> None:
        self._stood = [(p, weakref.ref(grad)) for p in parameters if (grad := p.grad) is not None]
        self.is_hooked = is_hooked
        # By parameter, whether it had no gradient when one arrived.
        self._arrived: dict[int, bool] = {}
        # The parameters to which a gradient was added.
        self._added: set[int] = set()
        hooked = [p for p, _ in self._stood if is_hooked and p.requires_grad]
        self._hooks = [_hook(p, self._noting(p)) for p in hooked]
        self._hooks += [_hook_after(p, self._noting_added(p)) for p in hooked if p.is_leaf]

    def or_none(self) -> "_Look | None":
        """This, if anything stood."""
        return self if self._stood else None

    def _noting(self, parameter: torch.Tensor) -> Callable[[torch.Tensor], None]:
        arrived = self._arrived

        def arrives(gradient: torch.Tensor) -> None:
            del gradient
            arrived[id(parameter)] = arrived.get(id(parameter), False) or parameter.grad is None

        return arrives

    def _noting_added(self, parameter: torch.Tensor) -> Callable[[torch.Tensor], None]:
        added, key = self._added, id(parameter)

        def is_added(_: torch.Tensor) -> None:
            added.add(key)

        return is_added

    def same(self) -> list[torch.Tensor]:
        """The parameters whose gradient is the very tensor that stood at the edge."""
        return [p for p, grad in self._stood if p.grad is not None and p.grad is grad()]

    def kept(self) -> list[torch.Tensor]:
        """The parameters whose gradient was not dropped since the edge."""
        here = {id(p) for p in self.same()}
        standing = [p for p, _ in self._stood if p.grad is not None and (id(p) in here or id(p) in self._added)]
        return [p for p in standing if not self._arrived.get(id(p), id(p) not in here)]

    def end(self) -> None:
        """Remove every hook."""
        while self._hooks:
            self._hooks.pop().remove()


class _Watched:
    """One optimizer: what stood at the last edge after its step, and what is known about its loop."""

    def __init__(self, item: OptimizerItem) -> None:
        self.item, self.optimizer = item, item.optimizer
        self.is_carried = False
        self.is_suspected = False
        self.looks_left = _FIRST_LOOKS
        # Saves since the last look that do not contain these gradients.
        self.saved_without: list[int] = []
        self.stood: _Look | None = None
        # The gradient whose turn it was, looked at in every step: it must cost nearly nothing.
        self.sample: tuple[torch.Tensor, weakref.ref[torch.Tensor]] | None = None
        # Instead of gradients that the checkpoint does not contain.
        self.stand_ins: _Look | None = None
        self._is_cleared = self._are_put_back = False
        self._sampled: list[torch.Tensor] = []

    @property
    def is_known(self) -> bool:
        """Whether the loop was seen to drop what stands at an edge, or to leave nothing there."""
        return (self._is_cleared or self.looks_left == 0) and not self.is_suspected

    @property
    def is_standing(self) -> bool:
        """Whether there are gradients now."""
        return any(p.grad is not None for p in self.parameters())

    def parameters(self) -> list[torch.Tensor]:
        """The parameters of the optimizer, group by group."""
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def look_at_one(self, turn: int) -> None:
        """Note what stands at this edge of the parameter whose turn it is."""
        if self._sampled and not self._are_put_back:
            parameter = self._sampled[turn % len(self._sampled)]
            grad = parameter.grad
            self.sample = (parameter, weakref.ref(grad)) if grad is not None else None

    def look(self) -> None:
        """Note all that stands at this edge."""
        self.forget()
        self.looks_left = max(self.looks_left - 1, 0)
        self._sampled = self.parameters()
        is_hooked = self.is_suspected or self._are_put_back or dist.is_initialized()
        self.stood = _Look(self._sampled, is_hooked=is_hooked).or_none()

    def forget(self) -> None:
        """Stop looking, and remove every hook."""
        if self.stood is not None:
            self.stood.end()
        self.stood = self.sample = None

    def judge(self) -> bool:
        """The optimizer steps: whether its loop is known from now on to use gradients of the step before."""
        look, was_suspected = self.stood, self.is_suspected
        if look is None:
            return False
        self.forget()
        same = look.same()
        kept = look.kept() if look.is_hooked else same
        if look.is_hooked and not kept and same:
            # Dropped, and the same memory was handed out again.
            self.is_suspected, self._is_cleared, self._are_put_back = False, True, True
        elif look.is_hooked and (kept or was_suspected):
            self.is_carried, self.is_suspected = True, False
            return True
        elif same:
            self.is_suspected = True
            return False
        else:
            self._is_cleared = True
        self.saved_without.clear()
        return False

    def refuse_stand_ins(self) -> None:
        """Pass if the first step after a resume uses no gradient that the checkpoint does not contain.

        Raises:
            NotExact: it does.
        """
        look, self.stand_ins = self.stand_ins, None
        if look is None:
            return
        look.end()
        if kept := look.kept():
            for parameter in kept:
                parameter.grad = None
            raise NotExact(differences=((GradientsItem.name, _missing(self.item.name)),))

    def can_be_saved(self) -> bool:
        """Whether a checkpoint can contain the gradients that stand."""
        if is_flat_sharded(self.item.module):
            return False
        try:
            for parameter in self.parameters():
                if parameter.grad is not None:
                    require_supported(GradientsItem.name, parameter.grad)
        except TensorUnsupported:
            return False
        return True


def _missing(name: str) -> str:
    return (
        f"the first step uses gradients of the step before it, which the checkpoint does not contain ({name}): the "
        "loop began to keep them after it was saved; resume from an older checkpoint"
    )


class StandingGradients:
    """Watches the gradients of every optimizer of a run."""

    def __init__(self, gradients: GradientsItem, *, accept: Iterable[str] = ()) -> None:
        self._gradients = gradients
        self._is_refused = gradients.name not in accept
        self._watched = [_Watched(item) for item in gradients.optimizers]
        for each in self._watched:
            each.is_carried = each.item.name in gradients.carried
        # What stands after the step of one optimizer may be used by another that shares its parameters.
        self._sharing = sharing([each.optimizer for each in self._watched])
        self._are_shared = any(len(each) > 1 for each in self._sharing)
        self._turn = 0
        self._has_saved = self._has_begun = False
        # Whether more is to be done in a step than to look at one parameter.
        self.is_busy = True
        self._at_edge: dict[int, Versions] = {}
        # What to log at the next edge, and whether a save is due to replace one without the gradients.
        self.notices: list[str] = []
        self.is_save_due = False
        self._undo = [each.optimizer.register_step_pre_hook(self._before(each)).remove for each in self._watched]

    def close(self) -> None:
        """Remove every hook."""
        while self._undo:
            self._undo.pop()()
        for each in self._watched:
            each.forget()
            if each.stand_ins is not None:
                each.stand_ins.end()

    # ---- one step ----

    def loop_starts(self) -> None:
        """Give the parameters the gradients of the checkpoint, whatever the script has computed before the loop."""
        self._has_begun = self._gradients.put_back() or self._has_begun
        unsaved, self._gradients.unsaved = self._gradients.unsaved, {}
        made: set[int] = set()
        for each in self._watched:
            if (mask := unsaved.get(each.item.name)) is not None and self._is_refused:
                each.stand_ins = _stand_in(each.parameters(), mask, made)

    def have_stand_ins(self) -> list[int]:
        """The numbers of the optimizers whose parameters have them."""
        return [number for number, each in enumerate(self._watched) if each.stand_ins is not None]

    def body_begins(self, stepped: Sequence[int]) -> None:
        """An edge is left; ``stepped`` are the optimizer steps of the body before it."""
        watched = self._watched
        if self._are_shared:
            stepped = [sum(stepped[number] for number in each) for each in self._sharing]
        if not self.is_busy:
            self._turn += 1
            turn, number = divmod(self._turn, len(watched))
            if stepped[number]:
                watched[number].look_at_one(turn)
            return
        if not self._has_begun:
            # Before the first body too: a loop that steps first fills its pipeline there.
            stepped, self._has_begun = [1] * len(watched), True
        for number, each in enumerate(watched):
            is_after_step = stepped[number] or (self._has_saved and each.saved_without)
            if is_after_step and not each.is_carried:
                each.look()
        self._has_saved = False
        self.is_busy = not watched or any(each.is_carried or each.is_suspected or each.looks_left for each in watched)
        self._at_edge = {
            number: versions_of(each.optimizer)
            for number, each in enumerate(watched)
            if each.is_carried or not each.is_known
        }

    def edge_reached(self) -> None:
        """A body is complete; called where ``is_busy``."""
        for each in self._watched:
            if each.is_suspected and not each.is_standing:
                # Nobody puts anything back here: what was used in this step was kept, if only once.
                each.is_carried, each.is_suspected = True, False
                self._learn(each)

    def stepped(self, number: int) -> None:
        """An optimizer has stepped; one with a closure has computed its gradients in there."""
        self._judge(self._watched[number])

    def _before(self, each: _Watched) -> Callable[..., None]:
        def before(_: object, args: Sequence[object], kwargs: Mapping[str, object]) -> None:
            if (kwargs or len(args) > 1) and any(map(callable, (*args[1:], *kwargs.values()))):
                return
            self._judge(each)

        return before

    def _judge(self, each: _Watched) -> None:
        if (sample := each.sample) is not None:
            each.sample = None
            grad = sample[0].grad
            if grad is not None and grad is sample[1]():
                each.is_suspected = self.is_busy = True
        if each.stand_ins is not None:
            each.refuse_stand_ins()
        if each.stood is not None and each.judge():
            self._learn(each)

    def _learn(self, each: _Watched) -> None:
        name, without = each.item.name, each.saved_without
        self._gradients.carried |= {name}
        kept = (
            f"the loop keeps the gradients of {name} from one step to the next (no zero_grad, "
            "zero_grad(set_to_none=False), step() before backward(), or another backward() after zero_grad())"
        )
        if not each.can_be_saved():
            self.notices.append(
                f"{kept}, and checkpoints cannot contain gradients of this type: a resume will not be exact. "
                f"Call {name}.zero_grad() at the end of each step, after every backward()"
            )
            return
        self.notices.append(
            f"{kept}, so checkpoints contain them from now on and are larger. To avoid that, call "
            f"{name}.zero_grad() at the end of each step, after every backward()"
        )
        if without:
            steps = ", ".join(f"{step:,}" for step in without)
            self.notices.append(f"the checkpoint of step {steps} lacks gradients that step {without[0] + 1:,} used")
            self.is_save_due = True
            without.clear()

    # ---- saves ----

    def needed(self) -> frozenset[str]:
        """The optimizers whose gradients a save at this edge has to contain."""
        return frozenset(each.item.name for each in self._watched if self._is_needed(each))

    def _is_needed(self, each: _Watched) -> bool:
        if each.stand_ins is not None or (each.is_known and not each.is_carried):
            return False
        return (each.is_carried or each.is_standing) and each.can_be_saved()

    def needed_of_left(self) -> frozenset[str]:
        """As ``needed``, in a body that was left after its step: what the loop would still drop is not known."""
        return frozenset(each.item.name for each in self._watched if each.is_carried) & self.needed()

    def agree(self, carried: Iterable[str]) -> None:
        """What any rank has seen is true for all."""
        for each in self._watched:
            if each.item.name in carried and not each.is_carried:
                each.is_carried = True
                each.forget()
                self._learn(each)

    def saved(self, step: int, stored: frozenset[str]) -> dict[str, str]:
        """A save was started; returns, by optimizer, which parameters have gradients that it does not contain."""
        self._has_saved = self.is_busy = True
        found: dict[str, str] = {}
        for each in self._watched:
            each.looks_left = max(each.looks_left, 1)
            if each.item.name in stored or is_flat_sharded(each.item.module):
                continue
            mask = [p.grad is not None for p in each.parameters()]
            if any(mask):
                each.saved_without.append(step)
                found[each.item.name] = _encode(mask)
        return found

    # ---- a body that is left in its middle ----

    def needed_of_edge(self) -> frozenset[str]:
        """As ``needed``, of the last edge, after a body without an optimizer step: what stands as it did there."""
        return frozenset(
            each.item.name
            for number, each in enumerate(self._watched)
            if (number in self._at_edge and all(self._untouched(number))) and self._is_needed(each)
        )

    @property
    def is_moved(self) -> bool:
        """Whether gradients that stood at the last edge were written or dropped since; all dropped, none is needed."""
        for number in self._at_edge:
            untouched = self._untouched(number)
            if not all(untouched) and any(each is not None for each in untouched):
                return True
        return False

    def _untouched(self, number: int) -> list[bool | None]:
        """Whether each gradient of the last edge is as it was; None for one that was dropped."""
        now = {id(grad()): count for grad, count in versions_of(self._watched[number].optimizer)}
        then = [(grad(), count) for grad, count in self._at_edge[number]]
        return [None if grad is None or id(grad) not in now else now[id(grad)] == count for grad, count in then]


def versions_of(optimizer: torch.optim.Optimizer) -> Versions:
    """Every gradient of an optimizer and how often it was written; weakly, for a new one may stand where one was."""
    grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    return [(weakref.ref(grad), sum(map(torch_private.write_count, local_tensors(grad)))) for grad in grads]


def _encode(mask: Sequence[bool]) -> str:
    """Which parameters, in the order of the groups: ``all``, or the bits of a hexadecimal number."""
    return _ALL if all(mask) else f"{sum(1 << place for place, has in enumerate(mask) if has):x}"


def _stand_in(parameters: Sequence[torch.Tensor], mask: str, made: set[int]) -> _Look | None:
    """Zeros where gradients stood that the checkpoint does not contain: the loop is expected to drop them unused.

    ``made`` are the parameters that have them already, for another optimizer.
    """
    bits = (1 << len(parameters)) - 1 if mask == _ALL else int(mask, 16)
    wanted = [p for place, p in enumerate(parameters) if bits >> place & 1 and (p.grad is None or id(p) in made)]
    for parameter in wanted:
        if id(parameter) not in made:
            parameter.grad = torch.zeros_like(parameter)
            made.add(id(parameter))
    return _Look(wanted, is_hooked=True).or_none()


def sharing(optimizers: Sequence[torch.optim.Optimizer]) -> list[list[int]]:
    """For each optimizer the numbers of those that have a parameter of it, its own among them."""
    held = [{id(p) for group in each.param_groups for p in group["params"]} for each in optimizers]
    return [
        [number for number, other in enumerate(held) if number == own or not other.isdisjoint(mine)]
        for own, mine in enumerate(held)
    ]
