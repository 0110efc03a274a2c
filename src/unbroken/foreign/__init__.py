"""Checkpoints of other tools: read as data, turned into items by name, committed as one of ours."""
