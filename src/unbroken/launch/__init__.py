"""Starting jobs: a parent of torchrun that owns the exit code."""
