"""The commands that need numpy or torch, one file each; ``cli/table.py`` names them by string."""
