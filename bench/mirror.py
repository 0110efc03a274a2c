"""Uploads and downloads of mirrors against the same client library alone, their memory, and what they cost a step.

    python -m bench.mirror [--endpoint URL] [--mebibytes 256] [--rounds 6] [--steps 300] [--only transfers|memory|steps]

Raw is obstore's own put and get of the same files with the same pieces and as many of them at a time: once as a program
gets it that changes no setting (each body's SHA-256 is signed), once with the settings of our client; ours adds the
digests of the local bytes, the proof in the store, the manifest, the records and, for downloads, the check of each
block. The rounds alternate and the first one counts. CPU seconds are those of this process; they say what the transfer
costs where the processors are busy. Without an endpoint a moto server is started (``.moto``); its processors are
those of the client, so its CPU seconds are shown too. The bucket is called ``bucket``; keys come from the environment.
"""

import argparse
import contextlib
import multiprocessing
import os
import secrets
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from bench.measure import read_results, write_results
from tests.mirror.made import opened, run_at, saved, uploaded
from tests.mirror.servers import environment, moto
from unbroken.mirror.background import Mirror, Mirroring
from unbroken.mirror.client import piece_bytes
from unbroken.mirror.fetch import fetch_checkpoint
from unbroken.mirror.objects import ObjectClient
from unbroken.mirror.remote import store_at
from unbroken.mirror.remove import remove_checkpoints
from unbroken.mirror.transfer import Limits
from unbroken.store.directory import Store

if TYPE_CHECKING:
    from obstore.store import ObjectStore

PARTS = 2


@contextlib.contextmanager
def _served(endpoint: str | None) -> Iterator[None]:
    if endpoint is not None:
        os.environ.update({"AWS_ENDPOINT_URL": endpoint, "AWS_EC2_METADATA_DISABLED": "true"})
        yield
        return
    with moto() as port:
        os.environ.update(environment(port))
        yield


def _children() -> list[str]:
    return Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()


def _children_cpu_s() -> float:
    """CPU seconds of the processes that this one started: the server."""
    children = _children()
    fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in children]
    return sum(int(each[11]) + int(each[12]) for each in fields) / os.sysconf("SC_CLK_TCK")


@dataclass
class Taken:
    """The rounds of one way: wall time, CPU time here, CPU time of the server."""

    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    server_cpu_s: list[float] = field(default_factory=list)

    def measure(self, way: Callable[[], None]) -> None:
        wall, cpu, server = time.perf_counter(), time.process_time(), _children_cpu_s()
        way()
        self.wall_s.append(time.perf_counter() - wall)
        self.cpu_s.append(time.process_time() - cpu)
        self.server_cpu_s.append(_children_cpu_s() - server)

    def line(self, title: str, mebibytes: int) -> str:
        rates = sorted(mebibytes / taken for taken in self.wall_s)
        per_gb = 1e9 / (mebibytes << 20)
        return (
            f"{title:24} {statistics.median(rates):6.0f} MiB/s ({rates[0]:.0f} to {rates[-1]:.0f})"
            f"   CPU s per GB: here {per_gb * statistics.median(self.cpu_s):.2f},"
            f" server {per_gb * statistics.median(self.server_cpu_s):.2f}"
        )


def _raw_ways(folder: Path, files: Sequence[Path], mirror: Mirror) -> dict[str, Callable[[], None]]:
    import obstore
    from obstore.store import S3Store

    assert isinstance(mirror.client, ObjectClient)
    raw, limits = mirror.client._store(), Limits()
    sizes = [file.stat().st_size for file in files]
    endpoint = os.environ["AWS_ENDPOINT_URL"]
    unchanged = S3Store("bucket", prefix="raw", endpoint=endpoint, client_options={"allow_http": True})

    def up(store: "ObjectStore") -> None:
        def put(n: int) -> None:
            piece = piece_bytes(sizes[n])
            obstore.put(store, f"{n}", files[n], chunk_size=piece, max_concurrency=limits.in_flight(piece))

        with ThreadPoolExecutor(limits.objects()) as pool:
            list(pool.map(put, range(len(files))))

    def down() -> None:
        target = folder / "raw-down"
        target.mkdir()
        with contextlib.ExitStack() as stack:
            opened_ = [stack.enter_context((target / str(n)).open("wb")) for n in range(len(files))]
            readers = stack.enter_context(ThreadPoolExecutor(limits.objects() * (limits.in_flight() + 1)))

            def get(place: tuple[int, int]) -> None:
                n, start = place
                data = obstore.get_range(raw, f"{n}", start=start, end=min(start + piece_bytes(sizes[n]), sizes[n]))
                os.pwrite(opened_[n].fileno(), data, start)

            wanted = [(n, start) for n, size in enumerate(sizes) for start in range(0, size, piece_bytes(size))]
            list(readers.map(get, wanted))
            for file in opened_:
                os.fsync(file.fileno())
        shutil.rmtree(target)

    return {"raw upload": partial(up, unchanged), "raw upload, our settings": partial(up, raw), "raw download": down}


def _transfers(folder: Path, mebibytes: int, rounds: int) -> dict[str, Taken]:
    store = run_at(folder / "run")
    name = saved(store, 10, {f"state/{n}": (mebibytes << 20) // PARTS for n in range(PARTS)})
    base = f"s3://bucket/{secrets.token_hex(6)}"
    files = [store.path(name) / f"state/{n}" for n in range(PARTS)]
    raw = _raw_ways(folder, files, opened(run_at(folder / "raw"), f"{base}/raw"))
    last: dict[str, Mirror] = {}

    def forget() -> None:
        for left in (store.root / ".mirror").glob("*"):
            left.unlink()

    def ours_up() -> None:
        uploaded(store, name, last["mirror"])

    def ours_down() -> None:
        back = run_at(folder / "back")
        fetch_checkpoint(store_at(last["mirror"].client), name, back, Limits(), job="bench", at_ns=1)

    ways = {**raw, "our upload": ours_up, "our download": ours_down}
    taken = {title: Taken() for title in ways}
    for _ in range(rounds):
        # What a job does once, when it starts.
        last["mirror"] = opened(store, f"{base}/{secrets.token_hex(6)}/run")
        for title, way in ways.items():
            taken[title].measure(way)
        remove_checkpoints(last["mirror"].client, [name])
        shutil.rmtree(folder / "back")
        forget()
    return taken


def _status_bytes(label: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(label))
    return int(line.split()[1]) * 1024


def _growth(folder: str, mebibytes: int, memory_bytes: int, said: "multiprocessing.Queue[dict[str, int]]") -> None:
    """How far the memory of a process grows over that of one that has moved a small checkpoint."""
    store, limits = run_at(Path(folder) / "run"), Limits(memory_bytes=memory_bytes)
    mirror = opened(store, f"s3://bucket/{secrets.token_hex(6)}/run")
    uploaded(store, saved(store, 1, {"state/a": 1000}), mirror, limits)
    piece = bytes(1 << 20)
    from unbroken.store.commit import Record, begin, commit

    draft = begin(store, step=2, job="a")
    reports = [draft.write_part(f"state/{n}", (piece for _ in range(mebibytes // PARTS))) for n in range(PARTS)]
    names = [f"state/{n}" for n in range(PARTS)]
    name = commit(draft, plan=names, parts=reports, record=Record(kind="periodic", saved_at_ns=1))
    grown = {}
    for way in ("upload", "download"):
        before = _status_bytes("VmRSS")
        # The highest mark is set back to what is used now.
        Path("/proc/self/clear_refs").write_text("5")
        if way == "upload":
            uploaded(store, name, mirror, limits)
        else:
            fetch_checkpoint(store_at(mirror.client), name, run_at(Path(folder) / "back"), limits, job="b", at_ns=1)
        grown[way] = _status_bytes("VmHWM") - before
    said.put(grown)


def _memory(folder: Path, mebibytes: int) -> dict[int, dict[str, int]]:
    context, found = multiprocessing.get_context("spawn"), {}
    for memory in (48, 128, 256):
        said: multiprocessing.Queue[dict[str, int]] = context.Queue()
        arguments = (str(folder / f"memory-{memory}"), mebibytes, memory << 20, said)
        child = context.Process(target=_growth, args=arguments)
        child.start()
        found[memory] = {way: grown >> 20 for way, grown in said.get(timeout=600).items()}
        child.join()
    return found


class _Silent:
    def mirrored(self, *results: object) -> None:
        pass

    def refused(self, *results: object) -> None:
        pass


def _steps(folder: Path, mebibytes: int, steps: int) -> dict[str, dict[str, float]]:
    """Milliseconds of a training step in turns of ten, without and with uploads that never end."""
    for child in _children():
        # A server is another machine: here it takes only what training leaves.
        os.setpriority(os.PRIO_PROCESS, int(child), 19)
    store = run_at(folder / "steps" / "run")
    name = saved(store, 10, {f"state/{n}": (mebibytes << 20) // PARTS for n in range(PARTS)})
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = torch.nn.Linear(1024, 4096)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    seconds: dict[str, list[tuple[float, float]]] = {"alone": [], "mirroring": []}
    is_on, is_over = threading.Event(), threading.Event()
    uploads = threading.Thread(target=_upload_forever, args=(store, name, is_on, is_over))
    uploads.start()
    for step in range(steps):
        title = "mirroring" if step // 10 % 2 else "alone"
        if step % 10 == 0:
            (is_on.set if title == "mirroring" else is_on.clear)()
            time.sleep(0.5)
        wall, cpu = time.perf_counter(), time.thread_time()
        model(torch.randn(256, 1024)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds[title].append((time.perf_counter() - wall, time.thread_time() - cpu))
    is_over.set()
    is_on.set()
    uploads.join()
    return {
        title: {kind: 1000 * statistics.median(each[n] for each in taken) for n, kind in enumerate(("wall", "cpu"))}
        for title, taken in seconds.items()
    }


def _upload_forever(store: Store, name: str, is_on: threading.Event, is_over: threading.Event) -> None:
    while not is_over.is_set():
        is_on.wait()
        for left in (store.root / ".mirror").glob("*"):
            left.unlink()
        mirror = opened(store, f"s3://bucket/{secrets.token_hex(6)}/run")
        mirroring = Mirroring(store, [mirror], Limits(), _Silent(), job="bench")
        mirroring.start()
        while is_on.is_set() and not is_over.is_set() and not mirroring.wait(0.2):
            pass
        mirroring.close()
        remove_checkpoints(mirror.client, [name])


def _print_transfers(taken: dict[str, Taken], mebibytes: int) -> None:
    for title, each in taken.items():
        print(each.line(title, mebibytes))
    for title in [each for each in taken if each.startswith("raw")]:
        way = title.removeprefix("raw ")
        ours, raw = taken[f"our {way.partition(',')[0]}"], taken[title]
        pairs = sorted(theirs / own for theirs, own in zip(raw.wall_s, ours.wall_s, strict=True))
        ratio = statistics.median(raw.wall_s) / statistics.median(ours.wall_s)
        print(f"{way} / raw: {ratio:.2f} (rounds {pairs[0]:.2f} to {pairs[-1]:.2f})")


def _print_steps(steps: dict[str, dict[str, float]]) -> None:
    for title, step in steps.items():
        print(f"step {title:10} {step['wall']:7.2f} ms, {step['cpu']:7.2f} ms of its own CPU")
    for kind in ("wall", "cpu"):
        print(f"step, {kind}: mirroring / alone {steps['mirroring'][kind] / steps['alone'][kind]:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--endpoint")
    parser.add_argument("--mebibytes", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--only", choices=["transfers", "memory", "steps"])
    asked = parser.parse_args()
    # Of one section alone, the figures of the others stay, if they are of the same size.
    facts = read_results("mirror") if asked.only else {}
    if facts.get("mebibytes", asked.mebibytes) != asked.mebibytes:
        parser.error(f"--only adds to results of --mebibytes {facts['mebibytes']}")
    facts["mebibytes"] = asked.mebibytes
    with _served(asked.endpoint), tempfile.TemporaryDirectory() as folder:
        if asked.only in (None, "transfers"):
            taken = _transfers(Path(folder), asked.mebibytes, asked.rounds)
            _print_transfers(taken, asked.mebibytes)
            facts["transfers"] = {title: vars(each) for title, each in taken.items()}
        if asked.only in (None, "memory"):
            facts["memory_mebibytes"] = memory = _memory(Path(folder), asked.mebibytes)
            for setting, grown in memory.items():
                print(f"mirror_memory_bytes {setting} MiB: {grown['upload']} MiB up, {grown['download']} MiB down")
        if asked.only in (None, "steps"):
            facts["steps_ms"] = steps = _steps(Path(folder), asked.mebibytes, asked.steps)
            _print_steps(steps)
    write_results("mirror", facts)


if __name__ == "__main__":
    main()
