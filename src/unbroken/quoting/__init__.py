"""Text from outside on its way into something that interprets it: a shell, a YAML reader, a terminal.

One module for each reader, and no other place in the tree quotes for it. Nothing here knows what a text means.
"""
