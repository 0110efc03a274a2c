"""SLURM: batch scripts, submission, and jobs that save before their walltime limit and requeue themselves."""
