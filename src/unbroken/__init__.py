"""unbroken: N short training jobs equal one long job, bit for bit.

Importing this package imports neither torch nor numpy.
"""

from unbroken.version import VERSION as __version__

__all__ = ["__version__"]
