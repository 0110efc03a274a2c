"""A streaming dataset of Hugging Face with a shuffle buffer, read by two loader workers.

    python streaming_dataset_plain.py [STEPS] [DIRECTORY]

``streaming_dataset.py`` is the same loop with a ``Run``.
"""

import hashlib
import sys
from collections.abc import Iterator

import torch
from datasets import Dataset, IterableDataset  # type: ignore[import-untyped]
from torch import nn
from torch.nn import functional
from torchdata.stateful_dataloader import StatefulDataLoader  # type: ignore[import-untyped]

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 60


def points(number: int) -> dict[str, list[float]]:
    """A point and the sum of its coordinates."""
    x = torch.rand(4, generator=torch.Generator().manual_seed(number)).tolist()
    return {"x": x, "y": [sum(x)]}


def stream() -> IterableDataset:
    """Four shards; files are read in the same way, by load_dataset(..., streaming=True)."""
    rows = Dataset.from_list([points(number) for number in range(200)])
    return rows.to_iterable_dataset(num_shards=4).shuffle(seed=7, buffer_size=50).with_format("torch")


def endless(loader: StatefulDataLoader, dataset: IterableDataset) -> Iterator[dict[str, torch.Tensor]]:
    epoch = 0
    while True:
        dataset.set_epoch(epoch)
        yield from loader
        epoch += 1


def main() -> None:
    torch.manual_seed(7)
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    dataset = stream()
    loader = StatefulDataLoader(dataset, batch_size=8, num_workers=2)

    batches = endless(loader, dataset)
    for _ in range(STEPS):
        batch = next(batches)
        loss = functional.mse_loss(model(batch["x"]), batch["y"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    weights = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    print("weights", hashlib.sha256(weights).hexdigest()[:16])


if __name__ == "__main__":
    main()
