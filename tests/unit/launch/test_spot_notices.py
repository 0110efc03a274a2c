"""What the clouds' answers mean, whose notices a job listens to, and where it asks: pure decisions."""

import json
from pathlib import Path

import pytest

from tests.e2e.clouds import azure_events
from unbroken.errors import BadSpot
from unbroken.launch.spot.notices import GCP_WINDOW_S, Notice, Unreadable, read_aws, read_azure, read_gcp
from unbroken.launch.spot.services import ServiceAddress, find_address
from unbroken.launch.spot.watch import choose, detect, polls_here
from unbroken.loop.settings import Settings

AT_S = 1_505_722_920.0


def test_a_notice_of_aws_has_an_action_and_a_time() -> None:
    found = read_aws(b'{"action": "terminate", "time": "2017-09-18T08:22:00Z"}')
    assert found == Notice("aws", "terminate", AT_S)
    assert found.sentence() == "AWS: terminate at 2017-09-18 08:22:00 UTC"


@pytest.mark.parametrize("time", ["2017-09-18T08:22:00Z", "2017-09-18T08:22:00", "2017-09-18T10:22:00+02:00"])
def test_a_time_is_the_same_instant_in_whatever_zone_it_is_reported(time: str) -> None:
    assert read_aws(json.dumps({"action": "stop", "time": time}).encode()).at_s == AT_S


BROKEN = [b"", b"<html>", b"[]", b"null", b"{}", b'{"action": "stop"}', b'{"action": "stop", "time": "soon"}', b"\xff"]


@pytest.mark.parametrize("body", BROKEN)
def test_an_answer_that_cannot_be_read_is_no_notice(body: bytes) -> None:
    with pytest.raises(Unreadable):
        read_aws(body)
    with pytest.raises(Unreadable):
        read_azure(body, "me")
    with pytest.raises(Unreadable):
        read_gcp(body, b"NONE", now_s=0.0)


def test_google_gives_thirty_seconds_from_when_it_reports_it() -> None:
    assert read_gcp(b"TRUE", b"NONE", now_s=100.0) == Notice("gcp", "preempt", 100.0 + GCP_WINDOW_S)
    assert read_gcp(b"FALSE\n", b"NONE", now_s=100.0) is None


def test_a_live_migration_takes_nothing_away_and_a_termination_does() -> None:
    assert read_gcp(b"FALSE", b"MIGRATE_ON_HOST_MAINTENANCE", now_s=0.0) is None
    found = read_gcp(b"FALSE", b"TERMINATE_ON_HOST_MAINTENANCE", now_s=0.0)
    assert found is not None and found.sentence() == "Google Cloud: terminate for host maintenance"


@pytest.mark.parametrize("what", ["Preempt", "Terminate", "Reboot", "Redeploy"])
def test_every_event_of_azure_that_ends_a_machine_is_a_notice(what: str) -> None:
    found = read_azure(azure_events(what, "me", "Mon, 18 Sep 2017 08:22:00 GMT"), "me")
    assert found == Notice("azure", what.lower(), AT_S)


def test_azure_events_of_other_machines_and_pauses_are_no_notice() -> None:
    assert read_azure(azure_events("Preempt", "neighbour"), "me") is None
    assert read_azure(azure_events("Freeze", "me"), "me") is None
    assert read_azure(b'{"DocumentIncarnation": 3, "Events": []}', "me") is None


def test_the_nearest_of_several_events_counts_and_one_that_has_begun_is_nearest() -> None:
    later = json.loads(azure_events("Reboot", "me", "Mon, 18 Sep 2017 09:22:00 GMT"))
    sooner = json.loads(azure_events("Preempt", "me", "Mon, 18 Sep 2017 08:22:00 GMT"))
    both = {"Events": [*later["Events"], *sooner["Events"]]}
    assert read_azure(json.dumps(both).encode(), "me") == Notice("azure", "preempt", AT_S)
    begun = {"Events": [*both["Events"], *json.loads(azure_events("Terminate", "me"))["Events"]]}
    assert read_azure(json.dumps(begun).encode(), "me") == Notice("azure", "terminate", None)


# ---- whose ----


def test_spot_notices_are_off_by_default(tmp_path: Path) -> None:
    (tmp_path / "sys_vendor").write_text("Amazon EC2\n")
    assert choose(None, {}, tmp_path) is None
    assert choose(None, {"UNBROKEN_SPOT": ""}, tmp_path) is None
    assert choose("off", {"UNBROKEN_SPOT": "aws"}, tmp_path) is None


def test_the_setting_wins_over_the_environment(tmp_path: Path) -> None:
    assert choose("gcp", {"UNBROKEN_SPOT": "aws"}, tmp_path) == "gcp"
    assert choose(None, {"UNBROKEN_SPOT": " azure "}, tmp_path) == "azure"


FIRMWARE = [
    ({"sys_vendor": "Amazon EC2"}, "aws"),
    ({"sys_vendor": "Xen", "bios_version": "4.11.amazon"}, "aws"),
    ({"sys_vendor": "Google", "product_name": "Google Compute Engine"}, "gcp"),
    ({"sys_vendor": "Microsoft Corporation", "chassis_asset_tag": "7783-7084-3265-9085-8269-3286-77"}, "azure"),
    ({"sys_vendor": "Microsoft Corporation", "chassis_asset_tag": "4532-1"}, None),
    ({"sys_vendor": "Dell Inc.", "product_name": "PowerEdge"}, None),
    ({}, None),
]


@pytest.mark.parametrize(("names", "cloud"), FIRMWARE)
def test_auto_knows_a_cloud_by_the_names_its_firmware_gives(
    tmp_path: Path, names: dict[str, str], cloud: str | None
) -> None:
    for name, value in names.items():
        (tmp_path / name).write_text(f"{value}\n")
    assert detect(tmp_path) == choose("auto", {}, tmp_path) == cloud


def test_a_word_that_is_none_is_refused_with_the_words_there_are(tmp_path: Path) -> None:
    with pytest.raises(BadSpot, match="one of aws, gcp, azure, auto, off"):
        choose(None, {"UNBROKEN_SPOT": "asw"}, tmp_path)
    with pytest.raises(ValueError, match=r"Settings\.spot is 'asw', not one of aws"):
        Settings(spot="asw")  # type: ignore[arg-type]


def test_the_first_process_of_each_node_listens_and_its_neighbours_do_not() -> None:
    assert polls_here({"LOCAL_RANK": "0", "RANK": "8"})
    assert not polls_here({"LOCAL_RANK": "1", "RANK": "9"})
    assert not polls_here({"SLURM_LOCALID": "3"})
    # torchrun inside one task of SLURM: the nearer launcher knows.
    assert not polls_here({"LOCAL_RANK": "1", "SLURM_LOCALID": "0"})
    assert polls_here({})


# ---- where ----


def test_the_address_is_the_one_of_every_cloud_or_of_this_machine() -> None:
    assert find_address({}) == ServiceAddress("169.254.169.254", 80)
    assert find_address({"UNBROKEN_SPOT_ADDRESS": "127.0.0.1:8080"}) == ServiceAddress("127.0.0.1", 8080)
    assert find_address({"UNBROKEN_SPOT_ADDRESS": "http://127.0.0.1:8080/"}) == ServiceAddress("127.0.0.1", 8080)
    assert find_address({"UNBROKEN_SPOT_ADDRESS": "[::1]:8080"}) == ServiceAddress("::1", 8080)
    assert find_address({"UNBROKEN_SPOT_ADDRESS": "169.254.169.254"}) == ServiceAddress()


OTHERS = ["10.0.0.1:80", "169.254.1.1:80", "8.8.8.8:80", "localhost:80", "example.org:80", "127.0.0.1:0", "127.0.0.1:x"]


@pytest.mark.parametrize("text", [*OTHERS, "[2001:db8::1]:80", "127.0.0.1:80/path", "0.0.0.0:80"])
def test_no_other_address_is_ever_contacted(text: str) -> None:
    with pytest.raises(BadSpot):
        find_address({"UNBROKEN_SPOT_ADDRESS": text})
