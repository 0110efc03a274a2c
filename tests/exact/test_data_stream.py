"""Ten thousand batches, bit for bit, whatever the world and the workers, over random kills."""

import contextlib
import hashlib
import json
import random
import signal
import time
from pathlib import Path

import pytest

import unbroken
from tests.exact.lanes import GLOBAL_BATCH, LANES, STEPS, Rank, digest, newest_state, noted, run_in_group, run_job
from tests.patience import PATIENCE_S
from tests.unit.data.streams import Lengths, lengths, make_corpus, open_stream
from unbroken.data.exactly_once import Served, expected
from unbroken.data.loader import Loader

CORPUS: Lengths = {
    "code": {"0": lengths(900, 60, 1), "1": lengths(700, 60, 2)},
    "web": {f"{number}": lengths(800, 60, 10 + number) for number in range(3)},
}
KILLS = 3


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("data")
    make_corpus(root, CORPUS)
    open_stream(root, max_length=16, overlap_size=3, epochs=None)
    return root


def _whole(folders: list[Path]) -> str:
    """One digest over all batches in global order; each was read with the same bits however often it was read."""
    found = noted(folders)
    assert sorted(found) == [(step, lane) for step in range(STEPS) for lane in range(LANES)]
    assert all(len(digests) == 1 for digests in found.values())
    whole = hashlib.sha256()
    for place in sorted(found):
        (digest,) = found[place]
        whole.update(digest.encode())
    return whole.hexdigest()


@pytest.fixture(scope="module")
def undisturbed(data: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of one process without workers that nobody killed."""
    notes = tmp_path_factory.mktemp("undisturbed")
    assert run_job([Rank(str(data), str(notes), 0, 1, 0)]) == [0]
    return _whole([notes])


def _job(
    data: Path, notes: Path, world: int, workers: int, state: Path | None, dies: tuple[int, int] | None
) -> list[int]:
    notes.mkdir()
    results = [
        Rank(
            str(data),
            str(notes),
            rank,
            world,
            workers,
            str(state) if state else None,
            dies[1] if dies and dies[0] == rank else None,
        )
        for rank in range(world)
    ]
    return run_job(results)


@pytest.mark.promise("G20", "C13")
@pytest.mark.parametrize(("world", "workers"), [(1, 0), (3, 2), (8, 1)])
def test_killed_at_random_batches_and_resumed_ten_thousand_batches_have_the_bits_of_one_run(
    world: int, workers: int, data: Path, undisturbed: str, tmp_path: Path
) -> None:
    drawn = random.Random(f"{world} {workers}")
    folders: list[Path] = []
    state: Path | None = None
    for kill in range(KILLS):
        folders.append(tmp_path / f"{kill}")
        per_rank = STEPS * LANES // world
        dies = drawn.randrange(world), drawn.randrange(per_rank // 20, per_rank // (KILLS + 1))
        ended = _job(data, folders[-1], world, workers, state, dies)
        assert ended[dies[0]] == -signal.SIGKILL
        state = newest_state(folders[-1], world) or state
    folders.append(tmp_path / "last")
    assert _job(data, folders[-1], world, workers, state, None) == [0] * world
    # Eight ranks on few cores may be killed each time before the slowest of them has kept a state.
    assert state is not None or world == 8
    assert _whole(folders) == undisturbed


@pytest.mark.promise("G20", "C13")
def test_every_job_of_a_run_may_have_another_world(data: Path, undisturbed: str, tmp_path: Path) -> None:
    folders: list[Path] = []
    state: Path | None = None
    for world, workers, dies in ((3, 0, (1, 700)), (1, 2, (0, 1_900)), (5, 0, (4, 480)), (2, 0, None)):
        folders.append(tmp_path / f"{world}")
        ended = _job(data, folders[-1], world, workers, state, dies)
        assert (-signal.SIGKILL in ended) == (dies is not None)
        state = newest_state(folders[-1], world) or state
    assert _whole(folders) == undisturbed


@pytest.mark.promise("G19")
def test_text_tokenized_on_the_fly_is_read_with_the_bits_of_one_run_too(tmp_path: Path) -> None:
    (tmp_path / "data" / "train").mkdir(parents=True)
    texts = [f"{number} " * (1 + number % 23) for number in range(400)]
    (tmp_path / "data" / "train" / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    assert _job(tmp_path / "data", tmp_path / "whole", 1, 0, None, None) == [0]
    folders = [tmp_path / "0", tmp_path / "1"]
    assert -signal.SIGKILL in _job(tmp_path / "data", folders[0], 3, 0, None, (2, 1_000))
    # A rank that is slow to start may have kept no state yet when another is killed: then the next job begins anew.
    state = newest_state(folders[0], 3)
    assert _job(tmp_path / "data", folders[1], 2, 0, state, None) == [0, 0]
    assert _whole(folders) == _whole([tmp_path / "whole"])


def test_the_account_of_a_killed_run_is_that_of_the_function(data: Path, tmp_path: Path) -> None:
    notes = tmp_path / "0"
    _job(data, notes, 1, 2, None, (0, 1_000))
    state = newest_state(notes, 1)
    assert state is not None
    kept = json.loads(state.read_text())
    stream = open_stream(data, max_length=16, overlap_size=3, epochs=None)
    assert Served.from_json(kept["served"]) == expected(stream.identities, 0, kept["position"])
    loader = Loader(stream, global_batch_size=GLOBAL_BATCH)
    loader.load_state_dict(kept)
    assert loader.state_dict()["served"] == kept["served"]


def test_a_job_killed_at_its_first_batch_leaves_nothing_that_blocks_the_next(tmp_path: Path) -> None:
    make_corpus(tmp_path / "data", {"web": {"0": lengths(200, 60, 1)}})
    for kill in range(2):
        assert _job(tmp_path / "data", tmp_path / f"{kill}", 2, 0, None, (0, 1))[0] == -signal.SIGKILL
    fresh = open_stream(tmp_path / "data", max_length=16, overlap_size=3, epochs=None)
    assert not [path for path in fresh.cache_dir.rglob("*") if path.name.startswith(".")]
    batch = next(iter(Loader(fresh, global_batch_size=GLOBAL_BATCH, per_device_batch_size=2)))
    assert noted([tmp_path / "0", tmp_path / "1"])[0, 0] == {digest(batch)}


@pytest.mark.promise("C13")
def test_a_run_keeps_where_the_loader_stands(data: Path, tmp_path: Path) -> None:
    read: list[range] = []
    for last in (3, 7, 12):
        loader = Loader(open_stream(data, max_length=16, overlap_size=3), global_batch_size=4)
        with unbroken.Run(tmp_path / "run", settings=unbroken.Settings(audit="off"), data=loader) as run:
            read += [next(run.data).samples for _ in run.steps(last)]
    assert read == [range(4 * step, 4 * step + 4) for step in range(12)]


def test_the_workers_of_a_killed_rank_end_with_it(data: Path, tmp_path: Path) -> None:
    notes = tmp_path / "0"
    notes.mkdir()
    group, ended = run_in_group(Rank(str(data), str(notes), 0, 1, 2, die_after=50))
    assert ended == -signal.SIGKILL
    ends_at = time.monotonic() + PATIENCE_S
    while _group_lives(group):
        assert time.monotonic() < ends_at, "workers outlive the rank they belong to"
        time.sleep(0.1)


def _group_lives(group: int) -> bool:
    """Whether a process of the group still runs; one that has ended and that nobody has asked for yet does not."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            state, _, of_group, *_ = stat.read_text().rpartition(")")[2].split()
            if int(of_group) == group and state != "Z":
                return True
    return False
