"""A directory of checkpoints as names and bytes: without torch, with checksums, crash-safe.

A save is ``commit.begin``, ``draft.write_part`` for each part, ``commit.commit``, ``sweep.settle``; a resume is
``choose.resume_point`` and ``parts.read_part``. Import from the modules: each is named for what it does, and a command
that lists does not pay for one that writes.
"""
