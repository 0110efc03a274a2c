"""The records of one run over many jobs."""
