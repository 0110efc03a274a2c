"""The version and the platform, in a module of their own so that reading them imports nothing else."""

VERSION = "0.1.0"
# The one `sys.platform` that everything is tested on.
SUPPORTED = "linux"
