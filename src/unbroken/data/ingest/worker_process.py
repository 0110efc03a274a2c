"""The main program of one worker process of a ``WorkerPool``: tokenizes units until its standard input ends."""

import json
import os
import queue
import signal
import sys
import threading
from pathlib import Path
from typing import IO, Any

from unbroken.data.ingest.encoders import Encoder, TokenizerFile, load_encoder
from unbroken.data.ingest.fast_engine import EnginesDiffer, with_fast_engine
from unbroken.data.ingest.tokenize_unit import UnitContext, tokenize_unit
from unbroken.data.ingest.work_folder import TokenizePlan, WorkFolder
from unbroken.data.ingest.worker_pool import error_to_json, send
from unbroken.errors import ShardDamaged, UnbrokenError
from unbroken.files import LOCAL

_SEND_EVERY_BYTES = 1 << 20


def _encoder_of(work: WorkFolder, plan: TokenizePlan, *, accelerate: bool) -> Encoder:
    """The encoder of a plan, with the fast engine if wanted and available.

    Raises:
        TokenizerUnknown: the copy of the tokenizer is not a tokenizer.
        ShardDamaged: it differs from the tokenizer of the plan.
        StorageFailed: an I/O error.
    """
    content = None
    if work.files.find(work.tokenizer_path) is not None:
        content = work.files.read_bytes(work.tokenizer_path, limit_bytes=1 << 30)
    encoder = load_encoder(TokenizerFile(plan.tokenizer.name, content), plan.eod_token)
    if encoder.identity.digest != plan.tokenizer.digest:
        complaint = "it is not the tokenizer of this tokenization"
        raise ShardDamaged(path=work.tokenizer_path, complaint=complaint)
    return with_fast_engine(encoder, content) if accelerate else encoder


class _ProgressSender:
    """Sends the number of bytes read, at most once per MiB."""

    def __init__(self, pipe: IO[str]) -> None:
        self._pipe = pipe
        self._unsent = 0

    def __call__(self, amount: int) -> None:
        self._unsent += amount
        if self._unsent >= _SEND_EVERY_BYTES:
            self.flush()

    def flush(self) -> None:
        """Send the bytes not sent yet."""
        send(self._pipe, {"bytes": self._unsent})
        self._unsent = 0


def _work(orders: "queue.SimpleQueue[dict[str, Any]]", pipe: IO[str]) -> None:
    settings = orders.get()
    work = WorkFolder(LOCAL, Path(settings["output_dir"]))
    plan = work.plan()
    if plan is None:
        return
    context = UnitContext(
        files=LOCAL,
        input_dir=Path(settings["input_dir"]),
        output_dir=Path(settings["output_dir"]),
        options=plan.options,
        encoder=_encoder_of(work, plan, accelerate=settings["accelerate"]),
        command=settings["command"],
        skip_bad=settings["skip_bad"],
    )
    progress = _ProgressSender(pipe)
    while True:
        number = orders.get()["unit"]
        work.record(plan, number, tokenize_unit(context, plan.units[number], progress))
        progress.flush()
        send(pipe, {"done": number})


def main() -> int:
    """Tokenize units until standard input is closed."""
    # Ctrl-C goes to every process of a terminal; the parent decides what to do.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    pipe = os.fdopen(os.dup(1), "w")
    # Output of libraries must not mix with messages.
    os.dup2(2, 1)
    orders: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(orders,), daemon=True).start()
    try:
        _work(orders, pipe)
    except EnginesDiffer as difference:
        send(pipe, {"differ": str(difference)})
    except UnbrokenError as error:
        send(pipe, {"error": error_to_json(error)})
    return 0


def _listen(orders: "queue.SimpleQueue[dict[str, Any]]") -> None:
    for line in sys.stdin:
        orders.put(json.loads(line))
    # The parent is gone. Nothing more may be written: the user may start the command again at once.
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
