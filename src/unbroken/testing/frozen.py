"""Imported last by a server that forks the ranks of worlds: what it has imported by then is no work for collectors.

A collector that visits an object writes to it. In a forked child that copies its page: with torch imported, most of
the CPU time of a short test.
"""

import gc

gc.collect()
gc.freeze()
