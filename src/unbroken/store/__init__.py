"""A directory of checkpoints as names and bytes: torch-free, provable, crash-safe."""
