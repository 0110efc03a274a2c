"""The program of one worker process: ``python -m unbroken.data.ingest.worker_main``. Started by ``workers`` alone."""

import json
import os
import queue
import signal
import sys
import threading
from pathlib import Path
from typing import IO, Any

from unbroken.data.ingest.accelerate import EnginesDiffer, faster
from unbroken.data.ingest.encoders import Encoder, TokenizerFile, load_encoder
from unbroken.data.ingest.unit_work import Terms, do_unit
from unbroken.data.ingest.workbench import Plan, Workbench
from unbroken.data.ingest.workers import error_to_json, say
from unbroken.errors import ShardDamaged, UnbrokenError
from unbroken.files import LOCAL

_TELL_EVERY_BYTES = 1 << 20


def _encoder_of(bench: Workbench, plan: Plan, *, accelerate: bool) -> Encoder:
    """The encoder that a plan was begun with; the faster engine over it, if that is wanted and there is one.

    Raises:
        TokenizerUnknown: the copy of the tokenizer describes none.
        ShardDamaged: it is another one, or differs by as little as a bit.
        StorageFailed: the system refused.
    """
    content = None
    if bench.files.find(bench.tokenizer_path) is not None:
        content = bench.files.read_bytes(bench.tokenizer_path, limit_bytes=1 << 30)
    encoder = load_encoder(TokenizerFile(plan.tokenizer.name, content), plan.eod_token)
    if encoder.identity.digest != plan.tokenizer.digest:
        complaint = "it is not the tokenizer that this tokenization began with"
        raise ShardDamaged(path=bench.tokenizer_path, complaint=complaint)
    return faster(encoder, content) if accelerate else encoder


class _Teller:
    """Says how many bytes were read, not more often than anybody can see."""

    def __init__(self, talk: IO[str]) -> None:
        self._talk = talk
        self._untold = 0

    def __call__(self, amount: int) -> None:
        self._untold += amount
        if self._untold >= _TELL_EVERY_BYTES:
            self.tell()

    def tell(self) -> None:
        """Say what was not said yet."""
        say(self._talk, {"bytes": self._untold})
        self._untold = 0


def _work(orders: "queue.SimpleQueue[dict[str, Any]]", talk: IO[str]) -> None:
    told = orders.get()
    bench = Workbench(LOCAL, Path(told["output_dir"]))
    plan = bench.plan()
    if plan is None:
        return
    terms = Terms(
        files=LOCAL,
        input_dir=Path(told["input_dir"]),
        output_dir=Path(told["output_dir"]),
        options=plan.options,
        encoder=_encoder_of(bench, plan, accelerate=told["accelerate"]),
        command=told["command"],
        skip_bad=told["skip_bad"],
    )
    teller = _Teller(talk)
    while True:
        number = orders.get()["unit"]
        bench.record(plan, number, do_unit(terms, plan.units[number], teller))
        teller.tell()
        say(talk, {"done": number})


def main() -> int:
    """Do units until standard input ends."""
    # Ctrl-C goes to every process of a terminal; the one that started us decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    talk = os.fdopen(os.dup(1), "w")
    # What a library prints must not be taken for an answer.
    os.dup2(2, 1)
    orders: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(orders,), daemon=True).start()
    try:
        _work(orders, talk)
    except EnginesDiffer as difference:
        say(talk, {"differ": str(difference)})
    except UnbrokenError as error:
        say(talk, {"error": error_to_json(error)})
    return 0


def _listen(orders: "queue.SimpleQueue[dict[str, Any]]") -> None:
    for line in sys.stdin:
        orders.put(json.loads(line))
    # Nobody is there any more: not one more byte may be written, for somebody may start the work anew.
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
