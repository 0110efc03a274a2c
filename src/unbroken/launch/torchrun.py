"""Which options this installation's torchrun takes, learned from its text: the launcher itself never imports torch.

torchrun's launcher module is looked at as a file. An option that a version lacks is left out; the launcher signals the
workers itself and keeps its own clock, so it stays right without them.
"""

import importlib.util
from pathlib import Path
from typing import Final

from unbroken.errors import TorchMissing

MODULE: Final = "torch.distributed.run"
ENDPOINT: Final = "--rdzv-endpoint"
# SIGINT is not among them: interrupted at the keyboard, torchrun ends its workers by SIGTERM, while a passed-on
# interrupt would reach a worker twice and count as the second one, which leaves at once.
SIGNALS: Final = "SIGTERM,SIGHUP,SIGQUIT,SIGUSR1,SIGUSR2"
SHUTDOWN_VARIABLE: Final = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"


def launcher_text() -> str:
    """The source of torchrun.

    Raises:
        TorchMissing: torch is not installed for this interpreter.
    """
    found = importlib.util.find_spec("torch")
    for place in (found.submodule_search_locations or ()) if found else ():
        source = Path(place) / "distributed" / "run.py"
        if source.is_file():
            return source.read_text(encoding="utf-8", errors="replace")
    raise TorchMissing(purpose="starting several processes")


def stopping_options(text: str, shutdown_timeout_s: int) -> list[str]:
    """The options that give workers their signals and the time a save needs, as far as this torchrun knows them."""
    options: list[str] = []
    if '"--signals-to-handle"' in text:
        options += ["--signals-to-handle", SIGNALS]
    if '"--shutdown-timeout"' in text:
        options += ["--shutdown-timeout", str(shutdown_timeout_s)]
    return options
