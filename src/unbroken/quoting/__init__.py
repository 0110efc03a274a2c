"""Escaping of untrusted text for a shell, YAML, a terminal and log files, and the formatting of amounts.

One module per target; nothing else in the package escapes for it.
"""
