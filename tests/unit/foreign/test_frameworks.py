"""Checkpoints that Transformers, Lightning and Accelerate really write, imported and loaded into the live objects."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import unbroken
from tests.unit.foreign.test_import import call, moments, same
from tests.unit.state.tiny import bits

pytestmark = pytest.mark.filterwarnings("ignore")


def test_a_checkpoint_of_the_transformers_trainer(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=16, n_positions=8)

    def make() -> Any:  # noqa: ANN401
        torch.manual_seed(0)
        return transformers.GPT2LMHeadModel(config)

    rows = [{"input_ids": torch.arange(8) % 16, "labels": torch.arange(8) % 16}] * 8
    options: dict[str, Any] = {"max_steps": 4, "save_steps": 2, "per_device_train_batch_size": 2, "use_cpu": True}
    args = transformers.TrainingArguments(tmp_path / "out", report_to=[], disable_tqdm=True, **options)
    trainer = transformers.Trainer(make(), args, train_dataset=rows)
    trainer.train()
    tied = "lm_head.weight=transformer.wte.weight"
    code, document = call(tmp_path / "out", tmp_path / "run", "--tie", tied)
    assert (code, document["tool"], document["step"]) == (0, "transformers", 4)
    assert {"model", "optimizer", "scheduler"} <= document["items"].keys()
    other = make()
    # The optimizer as the trainer groups it: with decay and without.
    again = transformers.Trainer(other, args)
    optimizer = again.create_optimizer()
    found = unbroken.load(tmp_path / "run", model=other, optimizer=optimizer)
    assert found.step == 4
    assert bits(other) == bits(trainer.model)
    assert same(moments(optimizer), moments(trainer.optimizer))


def test_a_checkpoint_of_lightning(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning")

    class Small(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(3, 1)

        def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
            loss: torch.Tensor = self.net(batch).pow(2).mean()
            return loss

        def configure_optimizers(self) -> Any:  # noqa: ANN401
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2)]

    module = Small()
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    trainer = lightning.Trainer(max_steps=3, default_root_dir=tmp_path, enable_checkpointing=False, **quiet)
    trainer.fit(module, torch.utils.data.DataLoader([*torch.randn(12, 3)], batch_size=2))  # type: ignore[arg-type]
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    code, document = call(tmp_path / "last.ckpt", tmp_path / "run", "--prefix", "net.")
    assert (code, document["step"], sorted(document["items"])) == (0, 3, ["model", "optimizer", "scheduler"])
    net = nn.Linear(3, 1)
    optimizer = torch.optim.AdamW(net.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    unbroken.load(tmp_path / "run", model=net, optimizer=optimizer, scheduler=scheduler)
    assert bits(net) == bits(module.net)
    assert same(moments(optimizer), moments(trainer.optimizers[0]))
    assert scheduler.step_size == 2


def test_a_state_of_accelerate(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    module = nn.Linear(3, 1)
    optimizer = torch.optim.AdamW(module.parameters())
    prepared, wrapped = accelerator.prepare(module, optimizer)
    accelerator.backward(prepared(torch.ones(2, 3)).sum())
    wrapped.step()
    accelerator.save_state(str(tmp_path / "checkpoint_0"))
    code, document = call(tmp_path / "checkpoint_0", tmp_path / "run")
    assert (code, document["kind"]) == (2, "cannot-import")
    code, document = call(tmp_path / "checkpoint_0", tmp_path / "run", "--step", "1")
    assert (code, document["tool"], document["step"]) == (0, "accelerate", 1)
    net = nn.Linear(3, 1)
    again = torch.optim.AdamW(net.parameters())
    unbroken.load(tmp_path / "run", model=net, optimizer=again)
    assert bits(net) == bits(module)
    assert same(moments(again), moments(optimizer))
