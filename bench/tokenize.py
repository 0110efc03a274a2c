"""Tokens per CPU second from a folder of JSON lines to shards on disk, beside Hugging Face's own batch encoding.

    python -m bench.tokenize [REPEATS]
    python -m bench.tokenize --processes [REPEATS]

The text is the sources of Python's standard library, the tokenizer a byte-level BPE of up to 32,000 ids learned from
part of it. Every measurement is a process of its own, one thread, CPU time as the kernel counts it; imports are
not counted. Ours counts loading the tokenizer, reading, parsing, encoding, checking, digesting and writing; the loop
beside it only parses, encodes and writes. Repeats are interleaved. Writes
bench/results/tokenize.json.

``--processes`` starts 1, 2 and 4 commands with one worker each at the same time on one output directory, and measures
the time until the last one ends and the CPU seconds of all, imports included. Writes
bench/results/tokenize_processes.json.
"""

import hashlib
import json
import os
import resource
import subprocess
import sys
import sysconfig
import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import median

from bench.measure import interleaved, write_results

VOCABULARY = 32_000
TRAINING_FILES = 700
BATCH = 256
PARTS = 16
COUNTS = (1, 2, 4)
SHARED_ROWS = 1200
HUGGING_FACE = "Hugging Face encode_batch"
OURS = "unbroken tokenize, reference"
ACCELERATED = "unbroken tokenize, accelerated"
BARS = {OURS: 1.0, ACCELERATED: 20.0}


def make_text(home: Path) -> None:
    """The documents, and a tiny folder that warms everything up."""
    library = Path(sysconfig.get_path("stdlib"))
    documents = []
    for path in sorted(library.rglob("*.py")):
        if "site-packages" not in path.parts:
            try:
                documents.append(path.read_text(encoding="utf-8"))
            except UnicodeDecodeError:
                continue
    for name, part in (("text", documents), ("learn", documents[:TRAINING_FILES]), ("warm", ["x = 1"] * 3)):
        (home / name).mkdir()
        rows = (json.dumps({"text": document}) + "\n" for document in part)
        (home / name / "all.jsonl").write_text("".join(rows))


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def measure_hugging_face(home: Path) -> dict[str, float]:
    """The straightforward loop: parse, encode_batch, end of document, one flat file."""
    import numpy as np
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(home / "tokenizer.json"))
    tokenizer.encode_special_tokens = True

    def run(source: Path, target: Path) -> int:
        tokens = 0
        with source.open() as lines, target.open("wb") as output:
            texts = [json.loads(line)["text"] for line in lines]
            for start in range(0, len(texts), BATCH):
                for found in tokenizer.encode_batch(texts[start : start + BATCH], add_special_tokens=False):
                    output.write(np.array([*found.ids, 0], np.uint16).tobytes())
                    tokens += len(found.ids) + 1
        return tokens

    run(home / "warm" / "all.jsonl", home / "warm.bin")
    before = _cpu_s()
    tokens = run(home / "text" / "all.jsonl", home / "huggingface.bin")
    return {"tokens": tokens, "cpu_s": _cpu_s() - before}


def measure_ours(home: Path, *, accelerate: bool) -> dict[str, float]:
    """All that ``unbroken tokenize`` does, in this process."""
    from unbroken.data.ingest.request import TokenizeRequest
    from unbroken.data.ingest.tokenize import tokenize

    def run(name: str, output: Path) -> int:
        request = TokenizeRequest(home / name, output, str(home / "tokenizer.json"), accelerate=accelerate)
        report = tokenize(request)
        if ("gigatoken" in report.engine) != accelerate:
            raise SystemExit(f"the engine was: {report.engine}")
        return report.totals.tokens

    with tempfile.TemporaryDirectory(dir=home) as folder:
        run("warm", Path(folder) / "warm")
        before = _cpu_s()
        tokens = run("text", Path(folder) / "out")
        return {"tokens": tokens, "cpu_s": _cpu_s() - before}


def measure(name: str, home: Path) -> float:
    """Million tokens per CPU second, from a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "bench.tokenize", "--one", name, str(home)],
        env={**os.environ, "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    counts = json.loads(done.stdout)
    return float(counts["tokens"] / counts["cpu_s"] / 1e6)


def tokenize_together(home: Path, processes: int) -> tuple[float, float]:
    """Seconds until the last of some commands ends, and the CPU seconds of all."""
    with tempfile.TemporaryDirectory(dir=home) as folder:
        command = [sys.executable, "-m", "unbroken", "tokenize", "--input-dir", str(home / "parts")]
        command += ["--output-dir", f"{folder}/out", "--tokenizer-path", str(home / "tokenizer.json")]
        command += ["--num-workers", "1", "--accelerator", "off", "--quiet"]
        before, started = os.times(), time.monotonic()
        running = [subprocess.Popen(command, stdout=subprocess.DEVNULL) for _ in range(processes)]
        if any(each.wait() for each in running):
            raise SystemExit("a command failed")
        took_s, after = time.monotonic() - started, os.times()
        files = sorted(path for path in Path(folder, "out").rglob("*") if path.is_file())
        digest = hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()
    known = home / "digest"
    if known.exists() and known.read_text() != digest:
        raise SystemExit("the files differ")
    known.write_text(digest)
    used = (after.children_user - before.children_user) + (after.children_system - before.children_system)
    return took_s, used


def measure_processes(repeats: int) -> None:
    """1, 2 and 4 commands on one output directory, in turn."""
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        make_text(home)
        train_small(home)
        rows = (home / "text" / "all.jsonl").read_text().splitlines(keepends=True)[:SHARED_ROWS]
        for number in range(PARTS):
            (home / "parts" / f"{number:02}").mkdir(parents=True)
            (home / "parts" / f"{number:02}" / "a.jsonl").write_text("".join(rows[number::PARTS]))
        rounds = [{count: tokenize_together(home, count) for count in COUNTS} for _ in range(repeats)]
        text_bytes = sum(map(len, rows))
    facts = {
        str(count): {
            "seconds": round(median(each[count][0] for each in rounds), 2),
            "cpu_s": round(median(each[count][1] for each in rounds), 2),
            "speedup": round(median(each[1][0] / each[count][0] for each in rounds), 2),
            "cpu_ratio": round(median(each[count][1] / each[1][1] for each in rounds), 2),
        }
        for count in COUNTS
    }
    for name, each in facts.items():
        cpu = f"CPU {each['cpu_s']} s, x {each['cpu_ratio']}"
        print(f"{name} processes  {each['seconds']:>7} s  x {each['speedup']}  {cpu}")
    settings = {"text_bytes": text_bytes, "units": PARTS, "repeats": repeats, "cores": len(os.sched_getaffinity(0))}
    settings["load"] = round(os.getloadavg()[0])
    schema = "unbroken.bench.tokenize-processes/1"
    print(write_results("tokenize_processes", {"schema": schema, **settings, "processes": facts}))


def train_small(home: Path) -> None:
    """A tokenizer for ``measure_processes``; how good it is does not matter there."""
    from unbroken.data.ingest.train_tokenizer import train_tokenizer

    train_tokenizer(home / "learn", home / "tokenizer.json", vocab_size=4_000)


def main() -> None:
    if sys.argv[1:2] == ["--processes"]:
        measure_processes(int(sys.argv[2]) if len(sys.argv) > 2 else 3)
        return
    if sys.argv[1:2] == ["--one"]:
        name, home = sys.argv[2], Path(sys.argv[3])
        is_ours = name != HUGGING_FACE
        counts = measure_ours(home, accelerate=name == ACCELERATED) if is_ours else measure_hugging_face(home)
        print(json.dumps(counts))
        return
    repeats = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    from unbroken.data.ingest.train_tokenizer import train_tokenizer

    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        make_text(home)
        trained = train_tokenizer(home / "learn", home / "tokenizer.json", vocab_size=VOCABULARY)
        text_bytes = (home / "text" / "all.jsonl").stat().st_size
        objects = {name: partial(measure, name, home) for name in (HUGGING_FACE, OURS, ACCELERATED)}
        found = interleaved(objects, repeats)
    baseline = found[HUGGING_FACE].median
    facts = {
        name: {
            "million_tokens_per_cpu_s": round(each.median, 3),
            "spread": each.spread,
            "times_hugging_face": round(each.median / baseline, 2),
            "bar": BARS.get(name),
        }
        for name, each in found.items()
    }
    for name, each in facts.items():
        print(f"{name:<32} {each['million_tokens_per_cpu_s']:>8} M tokens/CPU s  x {each['times_hugging_face']}")
    settings = {"vocab_size": trained.vocab_size, "text_bytes": text_bytes, "repeats": repeats}
    print(write_results("tokenize", {"schema": "unbroken.bench.tokenize/1", **settings, "engines": facts}))


if __name__ == "__main__":
    main()
