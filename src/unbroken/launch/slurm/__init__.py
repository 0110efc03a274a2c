"""SLURM: a script whose warning reaches the ranks, jobs that queue themselves again, chains where they may not."""
