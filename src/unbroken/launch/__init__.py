"""Launching jobs: the parent process of a training, under SLURM, Kubernetes or alone."""
