"""A classifier with loader workers, random augmentation, mixed precision and averaged weights, with a ``Run``.

    python classifier.py STEPS DIRECTORY

``classifier_plain.py`` is the same loop without a ``Run``.
"""

import hashlib
import sys
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset

import unbroken

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 60
Sample = tuple[torch.Tensor, torch.Tensor]


class Shapes(Dataset[Sample]):
    """Small noisy pictures of bars; each is shifted and flipped at random when it is read."""

    def __len__(self) -> int:
        return 128

    def __getitem__(self, index: int) -> Sample:
        label = index % 4
        picture = torch.zeros(1, 8, 8)
        picture[0, 2 * label : 2 * label + 2] = 1.0
        picture = picture + 0.3 * torch.randn(1, 8, 8)
        if torch.rand(()) < 0.5:
            picture = picture.flip(2)
        return picture.roll(int(torch.randint(8, ())), dims=2), torch.tensor(label)


def main() -> None:
    torch.manual_seed(7)
    torch.set_num_threads(1)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2), nn.Linear(512, 4)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=STEPS)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=10)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    loader = DataLoader(Shapes(), batch_size=16, shuffle=True, num_workers=2)

    items: dict[str, Any] = {"scheduler": scheduler, "scaler": scaler, "average": average, "data": loader}
    settings = unbroken.Settings(save_steps=10)
    run = unbroken.Run(sys.argv[2], settings=settings, model=model, optimizer=optimizer, **items)
    for _ in run.steps(STEPS):
        pictures, labels = next(run.data)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = functional.cross_entropy(model(pictures), labels)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        average.update_parameters(model)
        run.log(loss=loss)

    tensors = [*model.state_dict().values(), *average.state_dict().values()]
    print("weights", hashlib.sha256(b"".join(each.numpy().tobytes() for each in tensors)).hexdigest()[:16])


if __name__ == "__main__":
    main()
