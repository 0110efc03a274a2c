"""The services of three clouds on loopback, asked by a thread that nothing can hold up."""

import logging
import os
import time
from collections.abc import Callable, Iterator

import pytest

from tests.e2e.clouds import MACHINE, Cloud, azure_events, loopback_only, serving
from tests.patience import PATIENCE_S
from unbroken.errors import BadSpot
from unbroken.launch.spot import services
from unbroken.launch.spot.notices import Unreadable
from unbroken.launch.spot.services import Service, Unreachable, find_address, request, service_of
from unbroken.launch.spot.watch import SpotWatch, watch
from unbroken.records.layout import Layout
from unbroken.records.stop import StopReason, StopSources

CLOUDS = ("aws", "gcp", "azure")
SHORT_S = 0.02


@pytest.fixture(autouse=True)
def nobody_else_is_asked() -> Iterator[list[object]]:
    with loopback_only() as went:
        yield went


@pytest.fixture(autouse=True)
def a_busy_machine_has_time_to_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The services are threads of this process; nothing here is about one that is late."""
    assert request.__kwdefaults__ is not None
    monkeypatch.setitem(request.__kwdefaults__, "timeout_s", PATIENCE_S)


def service(cloud: Cloud, clock: Callable[[], float] = time.time) -> Service:
    return service_of(cloud.kind, find_address(cloud.environment), clock)  # type: ignore[arg-type]


def heard(watching: SpotWatch) -> StopReason:
    """The notice, as soon as there is one."""
    until_s = time.monotonic() + PATIENCE_S
    while (found := watching.look()) is None:
        assert time.monotonic() < until_s, "no notice was heard"
        time.sleep(0.005)
    return found


def after(condition: Callable[[], bool]) -> None:
    until_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < until_s
        time.sleep(0.005)


@pytest.mark.parametrize("kind", CLOUDS)
def test_a_service_that_has_no_notice_gives_none_and_one_that_has_gives_it(kind: str) -> None:
    with serving(kind) as cloud:
        asking = service(cloud)
        assert asking.poll() is None
        assert asking.poll() is None
        cloud.announce(in_s=100)
        found = asking.poll()
        assert found is not None and found.cloud == kind and found.at_s is not None
        assert 10 < found.at_s - time.time() < 110


def test_aws_is_queried_with_a_token_that_is_fetched_once() -> None:
    with serving("aws") as cloud:
        asking = service(cloud)
        for _ in range(3):
            assert asking.poll() is None
        assert cloud.asked == ["PUT /latest/api/token", *["GET /latest/meta-data/spot/instance-action"] * 3]


def test_a_token_that_has_expired_is_replaced_and_the_notice_is_heard() -> None:
    with serving("aws") as cloud:
        asking = service(cloud)
        assert asking.poll() is None
        cloud.expire()
        cloud.announce()
        assert asking.poll() is not None
        assert cloud.asked.count("PUT /latest/api/token") == 2


def test_google_counts_its_seconds_from_the_first_answer() -> None:
    now = [100.0]
    with serving("gcp") as cloud:
        asking = service(cloud, lambda: now[0])
        cloud.announce()
        first = asking.poll()
        now[0] = 120.0
        assert asking.poll() == first
        assert first is not None and first.at_s == 130.0


def test_an_answer_that_does_not_say_it_is_googles_is_not_believed() -> None:
    with serving("azure") as impostor, pytest.raises(Unreadable, match="lacks the header"):
        service_of("gcp", find_address(impostor.environment), time.time).poll()


def test_azure_events_of_other_machines_are_ignored() -> None:
    with serving("azure") as cloud:
        asking = service(cloud)
        cloud.notice = azure_events("Preempt", "a-neighbour")
        assert asking.poll() is None
        cloud.notice = azure_events("Preempt", MACHINE)
        assert asking.poll() is not None


@pytest.mark.parametrize("kind", CLOUDS)
def test_a_notice_that_cannot_be_read_is_reported_once_and_listening_continues(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "unbroken")
    with serving(kind) as cloud:
        cloud.notice = b"garbage"
        watching = SpotWatch(service(cloud), SHORT_S).start()
        after(lambda: len(cloud.asked) > 8)
        assert watching.look() is None
        cloud.announce()
        assert heard(watching).kind == "spot"
        results = [record.message for record in caplog.records]
        assert [line.split(":")[0] for line in results] == [
            "cannot read spot notices",
            "spot notices can be read again",
            "preemption notice",
        ]


@pytest.mark.parametrize("kind", CLOUDS)
def test_a_service_that_is_gone_is_reported_once_and_nothing_is_raised(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "unbroken")
    with serving(kind) as cloud:
        asking = service(cloud)
    watching = SpotWatch(asking, SHORT_S).start()
    after(lambda: bool(caplog.records))
    time.sleep(10 * SHORT_S)
    assert watching.look() is None and watching.deadline_s is None
    watching.end()
    assert len(caplog.records) == 1 and "cannot read spot notices" in caplog.records[0].message


def test_a_service_that_hangs_delays_no_training() -> None:
    with serving("aws") as cloud:
        cloud.is_hanging = True
        with pytest.raises(Unreachable, match="timed out"):
            request(find_address(cloud.environment), "/latest/api/token", method="PUT", timeout_s=0.1)
        watching = SpotWatch(service(cloud), SHORT_S).start()
        after(lambda: len(cloud.asked) > 1)
        # The thread is inside its question; look and end return all the same.
        assert watching.look() is None
        watching.end()


def test_a_watch_that_has_ended_asks_no_more() -> None:
    with serving("aws") as cloud:
        watching = SpotWatch(service(cloud), SHORT_S).start()
        after(lambda: len(cloud.asked) > 3)
        watching.end()
        watching._thread.join(PATIENCE_S)
        assert not watching._thread.is_alive()


def test_neither_a_proxy_nor_a_redirect_leads_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://10.1.2.3:3128")
    monkeypatch.setattr("tests.e2e.clouds._reply", lambda *_: (302, b""))
    with serving("aws") as cloud, pytest.raises(Unreachable, match="answered 302"):
        service(cloud).poll()


def test_an_answer_without_end_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(services, "_LIMIT_BYTES", 100)
    with serving("gcp") as cloud:
        monkeypatch.setattr("tests.e2e.clouds._reply", lambda *_: (200, b"x" * 100_000))
        assert len(request(find_address(cloud.environment), "/").body) == 100


def test_a_job_stops_by_a_notice_and_knows_when_the_machine_goes(tmp_path: os.PathLike[str]) -> None:
    with serving("aws") as cloud:
        watching = SpotWatch(service(cloud), SHORT_S).start()
        layout = Layout(tmp_path)  # type: ignore[arg-type]
        with StopSources(layout, job=1, clock=time.time, deadline_s=time.time() + 3600, notices=watching) as sources:
            assert sources.look() is None
            before_s = sources.deadline_s
            cloud.announce(in_s=90)
            heard(watching)
            reason = sources.look()
            assert reason is not None and reason.kind == "spot"
            assert reason.sentence().startswith("spot interruption notice (AWS: terminate at ")
            assert before_s is not None and sources.deadline_s is not None and sources.deadline_s < before_s
        assert watching._ended.is_set()


def test_only_the_process_that_listens_has_a_watch_and_all_refuse_what_is_wrong() -> None:
    environment = {"UNBROKEN_SPOT": "aws", "UNBROKEN_SPOT_ADDRESS": "127.0.0.1:9"}
    assert watch(None, {}) is None
    assert watch(None, environment) is not None
    assert watch(None, environment | {"LOCAL_RANK": "1"}) is None
    for wrong in ({"UNBROKEN_SPOT": "asw"}, {"UNBROKEN_SPOT_ADDRESS": "10.0.0.1:80"}):
        with pytest.raises(BadSpot):
            watch(None, environment | wrong | {"LOCAL_RANK": "1"})
