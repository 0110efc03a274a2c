"""What this machine can do: its file systems, Python, torch and GPUs, and whether training is exact on it.

Imports neither torch nor numpy. What only torch can tell is asked of a process of its own, ``self_test_process``.
"""
