"""Jobs that are asked to end, that meet a bad disk, or whose numbers go wrong; each is called in a child."""

import errno
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import unbroken
from tests.exact.training import Case, build, digest, is_saving, one_step, set_disk, train
from unbroken.disk import LocalDisk
from unbroken.errors import NonFiniteLoss, RunHeld, UnbrokenError
from unbroken.records.layout import Layout
from unbroken.records.stop import request_stop
from unbroken.testing import FaultyDisk, Operation, Refuse

Body = Callable[[unbroken.Run, int, dict[str, Any]], None]


def nothing(where: str) -> None:
    del where


def job(directory: str, total: int, body: Body, **settings: Any) -> dict[str, Any]:  # noqa: ANN401
    """A job that does something at each step; returns how it ended."""
    objects = build()
    with unbroken.Run(directory, settings=unbroken.Settings(logging_steps=1, **settings), **objects) as run:
        for step in run.steps(total):
            loss = one_step(objects, next(run.data), nothing)
            run.log(loss=loss)
            body(run, step + 1, objects)
    return {"step": run.step, "is_stopped": run.is_stopped, "digest": digest(objects, run)}


def signalled(directory: str, number: int) -> dict[str, Any]:
    def body(run: unbroken.Run, step: int, objects: dict[str, Any]) -> None:
        if step == 4:
            os.kill(os.getpid(), number)

    return job(directory, 12, body, save_steps=None)


def signalled_when_due(directory: str) -> dict[str, Any]:
    """The signal comes in the very step whose edge is due for a save."""

    def body(run: unbroken.Run, step: int, objects: dict[str, Any]) -> None:
        if step == 4:
            os.kill(os.getpid(), signal.SIGTERM)

    return job(directory, 12, body, save_steps=4)


def interrupted_twice(directory: str) -> bool:
    """The second Ctrl-C comes while a save hangs in its disk; returns whether it still hung when the job left."""

    def body(run: unbroken.Run, step: int, objects: dict[str, Any]) -> None:
        if step == 3:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1.2)
            os.kill(os.getpid(), signal.SIGINT)

    set_disk(HeldDisk(Path(directory) / "checkpoints"))
    try:
        job(directory, 12, body, save_steps=2)
    except KeyboardInterrupt:
        return is_saving()
    raise AssertionError("it went on")


def flagged(directory: str, job_number: int | None) -> dict[str, Any]:
    """The flag file appears while it trains: from `stop`, or made by hand."""
    layout = Layout(Path(directory))

    def body(run: unbroken.Run, step: int, objects: dict[str, Any]) -> None:
        if step == 3 and job_number is None:
            layout.stop_request.touch()
        elif step == 3:
            request_stop(layout, job=job_number or 0, by="a test", scratch=".scratch-test")
        time.sleep(0.2)

    return job(directory, 60, body, save_steps=None)


def until_stopped(directory: str) -> dict[str, Any]:
    return job(directory, 1_000_000, lambda run, step, objects: time.sleep(0.05), save_steps=None)


class HeldDisk(FaultyDisk):
    """A disk whose syncs inside a store do not return before they are let go."""

    def __init__(self, store: Path) -> None:
        super().__init__(LocalDisk())
        self._store = store
        self.go_on = threading.Event()

    def sync_file(self, handle: int) -> None:
        if self._store in self._path(handle).parents:
            self.go_on.wait()
        super().sync_file(handle)


class SlowDisk(FaultyDisk):
    """A disk whose syncs inside a store take their time; everything else continues meanwhile."""

    def __init__(self, store: Path, delay_s: float) -> None:
        super().__init__(LocalDisk())
        self._store, self._delay_s = store, delay_s

    def sync_file(self, handle: int) -> None:
        if self._store in self._path(handle).parents:
            time.sleep(self._delay_s)
        super().sync_file(handle)


def until_walltime(directory: str, max_runtime_s: float, delay_s: float) -> dict[str, Any]:
    """Slow storage and a deadline; returns how much of the time was left when the job had committed and ended."""
    began = time.time()
    set_disk(SlowDisk(Path(directory) / "checkpoints", delay_s))
    ended = job(
        directory,
        1_000_000,
        lambda run, step, objects: time.sleep(0.1),
        save_steps=10,
        max_runtime_seconds=max_runtime_s,
    )
    return {**ended, "remaining_s": max_runtime_s - (time.time() - began)}


def in_a_window(directory: str, grace_s: float, delay_s: float, scratch: str | None) -> dict[str, Any]:
    """Slow storage, a signal once a save was measured, and a kill when the window is over.

    The kill is real: what is not done by then is not done.
    """

    def body(run: unbroken.Run, step: int, objects: dict[str, Any]) -> None:
        if step == 3:
            run._open.opened.saver.wait()
        if step == 4:
            kill = threading.Timer(grace_s, os.kill, (os.getpid(), signal.SIGKILL))
            kill.daemon = True
            kill.start()
            os.kill(os.getpid(), signal.SIGTERM)
            # Where the window is nothing, the step does not end.
            time.sleep(0.0 if grace_s else 60.0)

    set_disk(SlowDisk(Path(directory) / "checkpoints", delay_s))
    return job(directory, 12, body, save_steps=2, grace_seconds=grace_s, emergency_dir=scratch)


def left_to_go_on(directory: str, scratch: str | None) -> dict[str, Any]:
    """The job after it, on storage that is as it should be."""
    return job(directory, 12, lambda run, step, objects: None, save_steps=None, emergency_dir=scratch)


def stopped_while_it_saves(directory: str) -> dict[str, Any]:
    """A save of step 2 is in flight, held by its disk, when the stop of step 3 comes."""
    disk = HeldDisk(Path(directory) / "checkpoints")
    set_disk(disk)
    in_flight: list[bool] = []

    def body(run: unbroken.Run, step: int, objects: dict[str, Any]) -> None:
        if step == 3:
            in_flight.append(is_saving())
            os.kill(os.getpid(), signal.SIGTERM)
            disk.go_on.set()

    return {**job(directory, 12, body, save_steps=2), "in_flight": in_flight}


def with_a_full_disk(directory: str, first: int, last: int) -> dict[str, Any]:
    """Writes into the store are refused while the run is between two steps."""
    store, at = Path(directory) / "checkpoints", [0]

    def plan(operation: Operation) -> Refuse | None:
        is_part = operation.name == "write" and store in operation.path.parents
        return Refuse(errno.ENOSPC) if is_part and first <= at[0] <= last else None

    set_disk(FaultyDisk(LocalDisk(), plan))
    links = []

    def body(run: unbroken.Run, step: int, objects: dict[str, Any]) -> None:
        at[0] = step
        # A save is looked at when it has ended: let it end inside the step that it was begun before.
        while is_saving():
            time.sleep(0.01)
        links.append(os.readlink(store / "latest") if os.path.lexists(store / "latest") else None)

    try:
        return {**job(directory, 12, body, save_steps=2), "links": links, "error": None}
    except UnbrokenError as refused:
        return {"links": links, "error": refused.kind}


def with_a_bad_loss(directory: str) -> dict[str, Any]:
    def body(run: unbroken.Run, step: int, objects: dict[str, Any]) -> None:
        if step == 5:
            run.log(loss=torch.tensor(float("nan")))

    try:
        job(directory, 12, body, save_steps=2)
    except NonFiniteLoss as bad:
        return {"step": bad.step, "exit_code": bad.exit_code, "kept": bad.resumable_step}
    raise AssertionError("it went on")


def poisoned(directory: str, step_of_poison: int) -> dict[str, Any]:
    """One bit of one gradient's effect is wrong in one step that was computed before."""

    def body(run: unbroken.Run, step: int, objects: dict[str, Any]) -> None:
        if step == step_of_poison:
            with torch.no_grad():
                objects["model"][0].weight[0, 0] += 2.0**-10

    return job(directory, 12, body, save_steps=6)


def second_job(directory: str) -> str:
    try:
        train(Case(directory))
    except RunHeld as held:
        return f"{held.kind} {held.exit_code}"
    return "it took the run"


def hold(directory: str, ready: str) -> None:
    """Hold the run and die without a word."""
    objects = build()
    with unbroken.Run(directory, **objects) as run:
        for _ in run.steps(5):
            Path(ready).touch()
            while Path(ready).exists():
                time.sleep(0.02)
            os.kill(os.getpid(), signal.SIGKILL)
