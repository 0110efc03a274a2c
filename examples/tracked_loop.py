"""A small training that trackers show as one run over all jobs.

    python tracked_loop.py STEPS DIRECTORY [TRACKERS]

Kill it and start it again: TensorBoard shows every step once. ``TRACKERS`` may be ``wandb:my-project, tensorboard``.
"""

import sys

import torch

import unbroken

STEPS, DIRECTORY, *REST = sys.argv[1:]


def main() -> None:
    torch.manual_seed(7)
    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    settings = unbroken.Settings(
        save_steps=20,
        logging_steps=1,
        trackers=REST[0] if REST else "tensorboard",
        tracker_config={"lr": 1e-2, "hidden": 32},
    )
    with unbroken.Run(DIRECTORY, settings=settings, model=model, optimizer=optimizer) as run:
        for _ in run.steps(int(STEPS)):
            features = torch.randn(64, 8)
            loss = (model(features).squeeze() - features.sum(1)).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.log(loss=loss)


if __name__ == "__main__":
    main()
