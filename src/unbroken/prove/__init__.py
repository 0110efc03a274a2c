"""Drills that kill, stop, resize, corrupt and replay a run, and compare bits."""
