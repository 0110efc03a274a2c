"""A loop with Accelerate on a small model with dropout: one long job.

python accelerate_loop_plain.py STEPS DIRECTORY
"""

import hashlib
import sys

import torch
from accelerate import Accelerator  # type: ignore[import-untyped]
from accelerate.utils import set_seed  # type: ignore[import-untyped]

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 40
PER_EPOCH = 7


def main() -> None:
    set_seed(7)
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Dropout(0.2), torch.nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    rows = torch.rand(50, 8, generator=torch.Generator().manual_seed(1))
    loader = torch.utils.data.DataLoader(rows, batch_size=4, shuffle=True)  # type: ignore[var-annotated, arg-type]
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

    for _ in range(STEPS // PER_EPOCH):
        for batch in loader:
            with accelerator.accumulate(model):
                loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

    weights = b"".join(value.detach().numpy().tobytes() for value in model.parameters())
    print("weights", hashlib.sha256(weights).hexdigest())


if __name__ == "__main__":
    main()
