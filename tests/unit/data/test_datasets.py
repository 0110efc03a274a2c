"""The stream in the hands of other trainers: their loaders, their loops, the same samples in the same order."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.unit.data.streams import make_stream, open_stream
from unbroken.data.datasets import SampleDataset, SampleIterable
from unbroken.data.stream import Stream


def _tokens(stream: Stream, first: int, last: int) -> list[list[int]]:
    found: list[list[int]] = stream.read(range(first, last)).tokens.tolist()
    return found


def _rows(batches: Sequence[dict[str, torch.Tensor]], name: str = "tokens") -> list[list[int]]:
    return [row for batch in batches for row in batch[name].tolist()]


# ---- map-style ----


@pytest.mark.parametrize("workers", [0, 2])
def test_item_k_is_sample_k_in_any_loader_of_torch(workers: int, tmp_path: Path) -> None:
    stream = make_stream(tmp_path)
    data = SampleDataset(stream)
    more = {"multiprocessing_context": "fork"} if workers else {}
    loader = DataLoader(data, batch_size=4, num_workers=workers, **more)  # type: ignore[arg-type]
    batches = list(loader)
    assert len(data) == len(stream) and _rows(batches) == _tokens(stream, 0, len(stream))
    rows = stream.read(range(4))
    assert batches[0]["labels"].tolist() == rows.labels.tolist()
    assert batches[0]["doc_ids"].tolist() == rows.doc_ids.tolist()
    assert batches[0]["positions"].tolist() == [list(range(32))] * 4


def test_a_sample_can_be_requested_alone_and_none_beyond_the_end(tmp_path: Path) -> None:
    data = SampleDataset(make_stream(tmp_path), length=10)
    assert data[9]["tokens"].tolist() == _tokens(data.stream, 9, 10)[0]
    for number in (-1, 10):
        with pytest.raises(IndexError):
            data[number]
        with pytest.raises(IndexError):
            data.__getitems__([0, number])


def test_a_stream_without_an_end_needs_a_length(tmp_path: Path) -> None:
    stream = make_stream(tmp_path, epochs=None)
    with pytest.raises(TypeError):
        SampleDataset(stream)
    assert len(SampleDataset(stream, length=10**12)) == 10**12


def test_the_names_are_those_that_hugging_face_models_take(tmp_path: Path) -> None:
    sample = SampleDataset(make_stream(tmp_path), names="huggingface")[0]
    assert sample.keys() == {"input_ids", "labels", "position_ids"}


# ---- iterable ----


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_any_number_of_workers_gives_the_samples_in_order_from_any_start(workers: int, tmp_path: Path) -> None:
    stream = make_stream(tmp_path)
    more = {"multiprocessing_context": "fork"} if workers else {}
    data = SampleIterable(stream, batch_size=4, start=5)
    batches = list(DataLoader(data, batch_size=4, num_workers=workers, **more))  # type: ignore[arg-type]
    whole = (len(stream) - 5) // 4 * 4
    assert _rows(batches) == _tokens(stream, 5, 5 + whole)


def test_ranks_share_every_step_and_have_as_many_batches_each(tmp_path: Path) -> None:
    stream = make_stream(tmp_path)
    ranks = [
        list(DataLoader(SampleIterable(stream, batch_size=2, rank=r, world_size=3), batch_size=2)) for r in range(3)
    ]
    assert len({len(batches) for batches in ranks}) == 1
    together = [row for step in zip(*ranks, strict=True) for row in _rows(step)]
    assert together == _tokens(stream, 0, len(stream) // 6 * 6)


@pytest.mark.parametrize(("batch", "start", "rank"), [(0, 0, 0), (1, -1, 0), (1, 0, 1)])
def test_shares_that_cannot_be_are_refused(batch: int, start: int, rank: int, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no batches"):
        SampleIterable(make_stream(tmp_path), batch_size=batch, start=start, rank=rank)


# ---- in the hands of real trainers ----


@pytest.mark.filterwarnings("ignore")
def test_transformers_trains_and_resumes_with_the_samples_of_one_run(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    make_stream(tmp_path / "data")

    def train(steps: int, directory: str, resume: bool = False) -> tuple[list[list[int]], torch.Tensor]:
        transformers.set_seed(1)
        config = transformers.LlamaConfig(
            vocab_size=257, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
        )
        model = transformers.LlamaForCausalLM(config)
        seen: list[list[int]] = []
        model.get_input_embeddings().register_forward_hook(lambda _, ids, __: seen.extend(ids[0].tolist()))
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path / directory),
            max_steps=steps,
            per_device_train_batch_size=4,
            save_steps=3,
            train_sampling_strategy="sequential",
            lr_scheduler_type="constant",
            use_cpu=True,
            report_to="none",
            disable_tqdm=True,
        )
        data = SampleDataset(open_stream(tmp_path / "data"), names="huggingface")
        transformers.Trainer(model=model, args=arguments, train_dataset=data).train(resume_from_checkpoint=resume)
        return seen, model.lm_head.weight.detach().clone()

    whole, weights = train(6, "whole")
    assert whole == _tokens(open_stream(tmp_path / "data"), 0, 24)
    begun, _ = train(3, "parts")
    resumed, resumed_weights = train(6, "parts", resume=True)
    assert begun + resumed == whole
    assert torch.equal(resumed_weights, weights)


@pytest.mark.filterwarnings("ignore")
def test_lightning_trains_with_the_samples_of_the_stream_in_their_order(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning")
    stream = make_stream(tmp_path / "data")

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.model = nn.Embedding(257, 4)
            self.seen: list[list[int]] = []

        def training_step(self, batch: dict[str, torch.Tensor], _: int) -> torch.Tensor:
            self.seen += batch["tokens"].tolist()
            loss: torch.Tensor = self.model(batch["tokens"]).square().mean()
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def fit(module: Any, start: int, steps: int, checkpoint: Path | None) -> None:  # noqa: ANN401
        trainer = lightning.Trainer(
            max_steps=steps, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, default_root_dir=tmp_path,
        )  # fmt: skip
        loader = DataLoader(SampleIterable(stream, batch_size=4, start=start), batch_size=4)
        trainer.fit(module, loader, ckpt_path=str(checkpoint) if checkpoint else None)
        trainer.save_checkpoint(tmp_path / "at.ckpt")

    first, second = Module(), Module()
    fit(first, 0, 3, None)
    position = 4 * 3
    (tmp_path / "position.json").write_text(json.dumps(position))
    fit(second, json.loads((tmp_path / "position.json").read_text()), 6, tmp_path / "at.ckpt")
    assert first.seen + second.seen == _tokens(stream, 0, 24)


def test_unknown_names_are_refused_at_once(tmp_path: Path) -> None:
    stream = make_stream(tmp_path)
    with pytest.raises(ValueError, match="one of unbroken, huggingface"):
        SampleDataset(stream, names="torch")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="one of unbroken, huggingface"):
        SampleIterable(stream, batch_size=2, names="torch")  # type: ignore[arg-type]
