"""What the trackers have stored, read from their own files: (step, loss) pairs, in the order in which they stand."""

import json
import sqlite3
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Points = list[tuple[int, float]]


def wandb_points(folder: Path) -> dict[str, Points]:
    """Of the offline files of every run, by its id: what ``wandb sync`` would upload, in its order."""
    from wandb.proto import wandb_internal_pb2

    found: dict[str, Points] = {}
    for file in sorted(folder.glob("wandb/offline-run-*/run-*.wandb")):
        points = found.setdefault(file.stem.removeprefix("run-"), [])
        for data in _log_records(file.read_bytes()):
            record: Any = getattr(wandb_internal_pb2, "Record")()  # noqa: B009 - made by protobuf
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "history":
                values = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
                assert values["_step"] == record.history.step.num
                points.append((values["_step"], values["loss"]))
    return found


def _log_records(data: bytes) -> Iterator[bytes]:
    """The records of a log of LevelDB's format behind wandb's header, their checksums verified."""
    at, held = 7, b""
    while at + 7 <= len(data):
        if (rest := 32768 - at % 32768) < 7:
            at += rest
            continue
        checksum, length, kind = struct.unpack_from("<IHB", data, at)
        if at + 7 + length > len(data) or not kind:
            return
        body = data[at + 7 : at + 7 + length]
        assert zlib.crc32(body, zlib.crc32(bytes([kind]))) == checksum
        at += 7 + length
        held = body if kind in (1, 2) else held + body
        if kind in (1, 4):
            yield held


def tensorboard_points(folder: Path, tag: str = "loss") -> dict[str, Points]:
    """As TensorBoard's own reader finds them, by the directory of the run."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]

    found: dict[str, Points] = {}
    for each in sorted(folder.glob("tensorboard/*")):
        events: Any = EventAccumulator(str(each), size_guidance={"scalars": 0})
        events.Reload()
        found[each.name] = [(point.step, point.value) for point in events.Scalars(tag)]
    return found


def trackio_points(database: Path) -> dict[str, Points]:
    """The rows of trackio's database, by the name of the run."""
    found: dict[str, Points] = {}
    with sqlite3.connect(database) as opened:
        for name, step, metrics in opened.execute("select run_name, step, metrics from metrics order by id"):
            found.setdefault(name, []).append((step, json.loads(metrics)["loss"]))
    opened.close()
    return found


def mlflow_points(folder: Path) -> dict[str, Points]:
    """The history of the loss in an MLflow store of files, by the id of the run."""
    found: dict[str, Points] = {}
    for file in sorted(folder.glob("*/*/metrics/loss")):
        lines = [line.split() for line in file.read_text().splitlines()]
        found[file.parents[1].name] = [(int(step), float(value)) for _, value, step, *_ in lines]
    return found
