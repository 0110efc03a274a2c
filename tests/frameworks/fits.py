"""Small trainings with the Trainer of Lightning, each described by a dict and run in a process of its own."""

import hashlib
import importlib
import json
import os
import random
import signal
import time
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch  # noqa: F401 - imported before a job is forked
import numpy
import torch
from torch.utils.data import DataLoader

import unbroken.frameworks.lightning  # noqa: F401 - imported before a job is forked

SAMPLES = 40


class Samples(torch.utils.data.Dataset[torch.Tensor]):
    """Vectors, each a function of its number; with ``noise`` drawn from the global RNG while it is read."""

    reads = 0

    def __init__(self, noise: float = 0.0) -> None:
        self._noise = noise

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        Samples.reads += 1
        value = torch.randn(8, generator=torch.Generator().manual_seed(index))
        return value + self._noise * torch.randn(8) if self._noise else value


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def network() -> torch.nn.Sequential:
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.2), torch.nn.ReLU(), torch.nn.Linear(16, 8))


def make_model(pl: Any, job: dict[str, Any]) -> Any:  # noqa: ANN401
    """A module with dropout, and a schedule of each kind that was asked for."""

    class Model(pl.LightningModule):  # type: ignore[misc]
        trained = 0

        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def _loss(self, batch: torch.Tensor | dict[str, torch.Tensor]) -> torch.Tensor:
            if isinstance(batch, dict):
                batch = torch.cat([*batch.values()])
            return torch.nn.functional.mse_loss(self.net(batch), batch)

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor | None:
            Model.trained += 1
            loss = self._loss(batch)
            self.log("train_loss", loss)
            self.log("mean_loss", loss, on_step=False, on_epoch=True)
            if job.get("inside") == [self.global_step + 1]:
                die()
            return loss

        def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
            self.log("val_loss", self._loss(batch))

        def configure_optimizers(self) -> Any:  # noqa: ANN401
            optimizer = torch.optim.AdamW(self.parameters(), lr=job.get("lr", 1e-2))
            if job.get("cosine"):
                return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)]
            if job.get("plateau"):
                plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5, threshold=10.0)
                return [optimizer], [{"scheduler": plateau, "monitor": "val_loss"}]
            decay = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.9)
            return [optimizer], [{"scheduler": decay, "interval": "step"}]

    class Manual(Model):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.other = network()

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
            for optimizer, net in zip(self.optimizers(), (self.net, self.other), strict=True):
                optimizer.zero_grad()
                self.manual_backward(torch.nn.functional.mse_loss(net(batch), batch))
                optimizer.step()

        def configure_optimizers(self) -> Any:  # noqa: ANN401
            return [torch.optim.AdamW(net.parameters(), lr=1e-2) for net in (self.net, self.other)]

    if job.get("average"):
        return averaged(Model)
    return Manual() if job.get("manual") else Model()


def averaged(kind: Any) -> Any:  # noqa: ANN401
    """A module that also keeps a mean of its weights."""

    class Averaged(kind):  # type: ignore[misc]
        """Keeps a mean of its weights by itself, in the two hooks that Lightning has for that."""

        def __init__(self) -> None:
            super().__init__()
            self.average = [value.detach().clone() for value in self.parameters()]

        def optimizer_step(self, *rest: Any, **more: Any) -> None:  # noqa: ANN401
            super().optimizer_step(*rest, **more)
            for mean, value in zip(self.average, self.parameters(), strict=True):
                mean.mul_(0.9).add_(value.detach(), alpha=0.1)

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["average"] = self.average

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            self.average = checkpoint["average"]

    return Averaged()


def interrupt(pl: Any, steps: dict[str, Any]) -> Any:  # noqa: ANN401
    """A callback that sends a signal at the end of a step, or makes a flag file."""

    class Interrupt(pl.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, trainer: Any, *rest: Any, **more: Any) -> None:  # noqa: ANN401
            if trainer.global_step != steps["step"] or trainer.global_rank != steps.get("rank", 0):
                return
            if "raises" in steps:
                raise ValueError(steps["raises"])
            if "flag" in steps:
                Path(steps["flag"]).touch()
                # It is read once a second.
                time.sleep(1.1)
            elif "number" in steps:
                os.kill(os.getpid(), steps["number"])

    return Interrupt()


def kill_in_save(job: dict[str, Any]) -> None:
    """Die in a save, where and when the job says."""
    if "torn" in job:
        kill_while_writing(job["torn"])
    if "cut" in job:
        kill_before(*job["cut"])


def kill_while_writing(step: int) -> None:
    """Die in the middle of the file that Lightning writes for a step."""
    save = torch.save

    def torn(value: Any, path: Any, *rest: Any, **more: Any) -> None:  # noqa: ANN401
        if isinstance(value, dict) and value.get("global_step") == step:
            die()
        save(value, path, *rest, **more)

    setattr(torch, "save", torn)  # noqa: B010 - typed otherwise


def kill_before(file: str, times: int) -> None:
    """Die before a file with this in its path is written for the so-manieth time."""
    save, seen = torch.save, []

    def cut(value: Any, path: Any, *rest: Any, **more: Any) -> None:  # noqa: ANN401
        if file in str(path):
            seen.append(path)
            if len(seen) == times:
                die()
        save(value, path, *rest, **more)

    setattr(torch, "save", cut)  # noqa: B010 - typed otherwise


def digest(trainer: Any, model: torch.nn.Module) -> str:  # noqa: ANN401
    """All that a training has come to: weights, optimizers, schedules and RNG states."""
    found = hashlib.sha256()
    engine = getattr(trainer.strategy, "deepspeed_engine", None)
    # Wrong moments of DeepSpeed show in the weights that follow.
    weights = model.state_dict() if engine is None else _zero_fits().weights_of(engine)
    for value in weights.values():
        found.update(value.detach().numpy().tobytes())
    found.update(b"" if engine is None else repr((engine.global_steps, engine.micro_steps)).encode())
    for optimizer in trainer.optimizers if engine is None else ():
        for key, text in sorted(_flat("", optimizer.state_dict())):
            found.update(f"{key}={text}".encode())
    for config in trainer.lr_scheduler_configs:
        found.update(repr(config.scheduler.state_dict()["_last_lr"]).encode())
    for callback in trainer.callbacks:
        average = getattr(callback, "_average_model", None)
        for value in () if average is None else average.state_dict().values():
            found.update(value.numpy().tobytes())
    for value in getattr(model, "average", ()):
        found.update(value.numpy().tobytes())
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    found.update(b"" if scaler is None else repr(scaler.state_dict()).encode())
    found.update(torch.get_rng_state().numpy().tobytes())
    found.update(repr(random.getstate()).encode() + repr(numpy.random.get_state()).encode())
    return found.hexdigest()


def _flat(at: str, value: object) -> list[tuple[str, str]]:
    if isinstance(value, dict):
        return [each for key, inner in value.items() for each in _flat(f"{at}.{key}", inner)]
    if isinstance(value, list):
        return [each for place, inner in enumerate(value) for each in _flat(f"{at}.{place}", inner)]
    return [(at, value.numpy().tobytes().hex() if isinstance(value, torch.Tensor) else repr(value))]


def _zero_fits() -> Any:  # noqa: ANN401
    return importlib.import_module("tests.frameworks.zero_fits")


def make_callbacks(pl: Any, ours: Any, job: dict[str, Any]) -> list[Any]:  # noqa: ANN401
    """The callbacks that a job asks for, ours first: it moves behind the others by itself."""
    callbacks: list[Any] = [] if job.get("plain") else [ours.Callback(job["directory"], **job.get("options", {}))]
    callbacks += [interrupt(pl, each) for each in job.get("interrupts", ())]
    if job.get("ema"):
        callbacks.append(pl.callbacks.EMAWeightAveraging(decay=0.9))
    if job.get("swa"):
        callbacks.append(pl.callbacks.StochasticWeightAveraging(swa_lrs=1e-3))
    if job.get("accumulate"):
        schedule = {int(epoch): batches for epoch, batches in job["accumulate"].items()}
        callbacks.append(pl.callbacks.GradientAccumulationScheduler(schedule))
    if job.get("early"):
        callbacks.append(pl.callbacks.EarlyStopping("val_loss", patience=2, min_delta=10.0))
    return callbacks


def make_logger(pl: Any, directory: Path, name: str) -> Any:  # noqa: ANN401
    """The logger of Lightning that a job asks for, or none."""
    if name == "tensorboard":
        return pl.loggers.TensorBoardLogger(directory, name="tensorboard", version="shown")
    return pl.loggers.CSVLogger(directory, "log") if name == "csv" else False


def make_data(pl: Any, job: dict[str, Any]) -> dict[str, Any]:  # noqa: ANN401
    """The loaders of a job: one, a short one beside a long one, or another one for each epoch."""
    kind: Any = DataLoader
    if job.get("stateful"):
        kind = importlib.import_module("torchdata.stateful_dataloader").StatefulDataLoader
    data = Samples(job.get("noise", 0.0))

    def loader(samples: Any = data) -> Any:  # noqa: ANN401
        return kind(samples, **{"batch_size": 4, "shuffle": True, **job.get("loader", {})})

    class Made(pl.LightningDataModule):  # type: ignore[misc]
        def train_dataloader(self) -> Any:  # noqa: ANN401
            return loader(torch.utils.data.Subset(data, range(self.trainer.current_epoch * 4, SAMPLES)))

        def val_dataloader(self) -> Any:  # noqa: ANN401
            return DataLoader(data, batch_size=8)

    if job.get("made"):
        return {"datamodule": Made()}
    loaders = {"a": loader(), "b": loader(torch.utils.data.Subset(data, range(12)))} if job.get("pair") else loader()
    return {"train_dataloaders": loaders, "val_dataloaders": DataLoader(data, batch_size=8)}


def train(job: dict[str, Any]) -> None:
    """Do one job. ``plain``: without unbroken. ``trainer``, ``checkpoint``: more arguments. ``result``: its end."""
    warnings.simplefilter("ignore")
    package = job.get("package", "lightning")
    pl = importlib.import_module("lightning.pytorch" if package == "lightning" else package)
    ours = importlib.import_module(f"unbroken.frameworks.{package}")
    torch.set_num_threads(1)
    pl.seed_everything(7, verbose=False)
    model = make_model(pl, job)
    directory = Path(job["directory"])
    savers = [
        pl.callbacks.ModelCheckpoint(**{"dirpath": directory / "models", "save_last": True, **each})
        for each in job.get("checkpoints", [{"every_n_train_steps": 4}])
    ]
    callbacks = make_callbacks(pl, ours, job)
    trainer = pl.Trainer(
        **{
            "max_steps": 24,
            "accelerator": "cpu",
            "devices": 1,
            "logger": make_logger(pl, directory, job.get("logger", "")),
            "default_root_dir": job["directory"],
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "limit_val_batches": 0,
            "log_every_n_steps": 1,
            "callbacks": [*callbacks, *savers],
            **({"strategy": _zero_fits().strategy(job["zero"])} if "zero" in job else {}),
            **({"plugins": [pl.plugins.MixedPrecision("16-mixed", "cpu")]} if job.get("scaler") else {}),
            **job.get("trainer", {}),
        }
    )
    kill_in_save(job)
    is_stopped, reason = False, ""
    try:
        trainer.fit(model, **make_data(pl, job), ckpt_path=job.get("ckpt_path", "last"))
    except ours.Stopped as stopped:
        is_stopped, reason = True, str(stopped)
    except ValueError:
        if not job.get("catches"):
            raise
    result = {
        "digest": digest(trainer, model),
        "step": trainer.global_step,
        "epoch": trainer.current_epoch,
        "is_stopped": is_stopped,
        "reason": reason,
        "reads": Samples.reads,
        "trained": model.trained,
        "best": [saver.best_model_path for saver in savers],
        "scores": [sorted(float(score) for score in saver.best_k_models.values()) for saver in savers],
        "last": [saver.last_model_path for saver in savers],
        "rates": [config.scheduler.state_dict()["_last_lr"] for config in trainer.lr_scheduler_configs],
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
    }
    if job.get("convert"):
        result["converts"] = _zero_fits().converted(trainer, savers, directory.parent / "converted")
    if int(os.environ.get("RANK", "0")) == 0:
        Path(job["result"]).write_text(json.dumps(result))
