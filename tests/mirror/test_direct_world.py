"""Ranks that share no disk: each sends its own parts to the object store and reads only what it needs from there."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mirror.direct_world import Alone, train
from tests.mirror.made import client_of, run_at
from tests.mirror.servers import Proxy
from unbroken.mirror.remote import store_at
from unbroken.store.check import Level, verify
from unbroken.store.scan import scan
from unbroken.testing.worlds import logs, spawn

_PART = re.compile(r"/(?P<name>state/__[0-9]+_0\.distcp)$")


def results(size: int, job: Alone) -> list[tuple[int, str]]:
    ended = spawn(size, train, job)
    assert all(each.is_good for each in ended), logs(ended)
    return [each.value for each in ended]


def read_bytes(proxy: Proxy) -> dict[str, int]:
    """The bytes of tensors that one rank asked for, by the part."""
    found: dict[str, int] = {}
    for asked in proxy.seen:
        place = next((value for name, value in asked.headers.items() if name.lower() == "range"), None)
        part = _PART.search(asked.path.partition("?")[0])
        if asked.method == "GET" and part is not None:
            assert place is not None, "a whole part was asked for"
            start, end = map(int, place.removeprefix("bytes=").split("-"))
            found[part["name"]] = found.get(part["name"], 0) + end - start + 1
    return found


@pytest.fixture
def proxies(server: int) -> Iterator[list[Proxy]]:
    """One for each rank, so that their requests can be told apart."""
    made = [Proxy(server) for _ in range(2)]
    yield made
    for each in made:
        each.close()


@pytest.mark.promise("C4", "K7")
@pytest.mark.needs("moto")
def test_ranks_without_a_shared_disk_save_and_each_reads_only_its_own_shards_back(
    direct: int, proxies: list[Proxy], url: str, tmp_path: Path
) -> None:
    ports = [proxy.port for proxy in proxies]
    results(2, Alone(str(tmp_path), url, 4, ports))
    # Each rank sent its own parts, and no rank those of the other.
    for rank, proxy in enumerate(proxies):
        sent = {part["name"] for asked in proxy.seen if asked.method == "PUT" and (part := _PART.search(asked.path))}
        assert sent == {f"state/__{rank}_0.distcp"}
        proxy.seen.clear()
    # A new pair of machines.
    for rank in range(2):
        shutil.rmtree(tmp_path / f"host-{rank}", ignore_errors=True)
    (tmp_path / "whole").mkdir()
    expected = results(2, Alone(str(tmp_path / "whole"), f"file://{tmp_path}/whole/run", 7))
    resumed = results(2, Alone(str(tmp_path), url, 7, ports, seed=9))
    assert [began for began, _ in resumed] == [4, 4]
    assert [bits for _, bits in resumed] == [bits for _, bits in expected]
    store = store_at(client_of(run_at(tmp_path / "run"), url))
    sizes = {part.name: part.size_bytes for part in store.read_manifest("final").parts}
    for rank, proxy in enumerate(proxies):
        asked = read_bytes(proxy)
        own = f"state/__{rank}_0.distcp"
        assert set(asked) == {own} and asked[own] <= sizes[own] + 4096, (rank, asked, sizes)


@pytest.mark.promise("C4", "K7")
def test_a_world_without_a_shared_disk_that_loses_a_rank_resumes_bit_for_bit(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/store/run"
    (tmp_path / "store").mkdir()
    ended = spawn(2, train, Alone(str(tmp_path), url, 20, dies_at=5))
    assert not any(each.is_good for each in ended)
    for rank in range(2):
        shutil.rmtree(tmp_path / f"host-{rank}", ignore_errors=True)
    resumed = results(2, Alone(str(tmp_path), url, 8, seed=9))
    (tmp_path / "whole").mkdir()
    expected = results(2, Alone(str(tmp_path / "whole"), f"file://{tmp_path}/whole/run", 8))
    assert resumed[0][0] in (2, 4)
    assert [bits for _, bits in resumed] == [bits for _, bits in expected]
    store = store_at(client_of(run_at(tmp_path / "run"), url))
    assert all(verify(store, name, Level.FULL).is_sound for name in scan(store).committed)
