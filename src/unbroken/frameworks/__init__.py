"""Runs whose training loop belongs to a framework: its own extension points, our checkpoints, records and stops.

- ``framework_run``: what every framework shares: the lease, the records, stop requests, mirrors; ``folders``: how a
  folder that the framework wrote becomes a checkpoint; ``epoch_rng``: the RNG states that an epoch began with;
  ``options``: what a script can set.
- ``accelerate``: loops with Accelerate; ``accelerate_job``: one job of it; ``accelerator_contents``: what its
  checkpoints are made of; ``loader_pass``: a pass over a loader that a later job continues.
- ``transformers``: the Trainer of Transformers, and what inherits from it; ``trainer_job``: one job of it.
- ``lightning`` and ``pytorch_lightning``: the Trainer of Lightning under both names; ``lightning_events``: its events;
  ``lightning_job``: one fit; ``lightning_state``: what its checkpoint says; ``lightning_links``: the paths of
  ``ModelCheckpoint``; ``lightning_loader``: the position in the training data.
- ``dcp``: loops that call torch's ``dcp.save`` and ``dcp.load``; ``dcp_storage``: writer and reader;
  ``torchtitan``: its ``CheckpointManager``, with them.
- ``deepspeed``: engines of DeepSpeed; ``own_loop``: what it shares with ``dcp``: a run for a loop of the script's own.
- ``left_training``: what a run that an exception left is recorded with.

Each module needs the package it is named after; ``import unbroken`` imports none of them.
"""
