"""Runs whose training loop belongs to a framework: its own extension points, our checkpoints, records and stops.

- All frameworks share ``framework_run`` (the lease, the records, stop requests, mirrors), ``folders`` (a folder that
  the framework wrote becomes a checkpoint), ``epoch_rng`` (the RNG states at the start of an epoch), ``options`` (the
  options of a script) and ``left_training`` (the ending that is recorded after an exception).
- Accelerate: ``accelerate`` has what a loop calls; ``accelerate_job`` is one job; ``accelerator_contents`` has what its
  checkpoints contain; ``loader_pass`` continues a pass over a loader in a later job; ``before_batches`` restores what
  the loop changes before the batches of an epoch.
- Transformers: ``transformers`` has the callback for its Trainer and those that inherit from it; ``trainer_job`` is one
  job; ``trainer_batches`` has the position in the training data.
- Lightning: ``lightning`` and ``pytorch_lightning`` have the callback under both package names; ``lightning_events``
  has its events; ``lightning_job`` is one fit; ``lightning_state`` reads its checkpoint; ``lightning_links`` has the
  paths of ``ModelCheckpoint``; ``lightning_leftovers`` removes what a killed job left there; ``lightning_loader`` has
  the position in the training data; ``lightning_metrics`` has the metrics of an unfinished epoch.
- torch's DCP: ``dcp`` has what a loop calls; ``dcp_storage`` is the writer and reader; ``torchtitan`` is its
  ``CheckpointManager`` with them.
- DeepSpeed: ``deepspeed`` has what a loop calls; ``zero_engine`` reads an engine. ``own_loop`` is a run for a loop of
  the script's own, shared by DCP and DeepSpeed.

Each module needs the package it is named after; ``import unbroken`` imports none of them.
"""
