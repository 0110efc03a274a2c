"""Public helpers for users' own tests: a disk that fails on request, and one that forgets what was not synced."""
