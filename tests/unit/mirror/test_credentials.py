"""Keys from the shared files of the AWS tools."""

from pathlib import Path

from unbroken.mirror.credentials import asks_metadata, in_environment, read_profile, renewing


def files(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "credentials").write_text(
        "[default]\naws_access_key_id = A\naws_secret_access_key = very-secret\n"
        "[work]\naws_access_key_id = W\naws_secret_access_key = work-secret\naws_session_token = T\n"
    )
    (tmp_path / "config").write_text(
        "[default]\nregion = eu-west-1\n[profile work]\nregion = eu-north-1\nendpoint_url = http://127.0.0.1:9\n"
    )
    names = {"AWS_SHARED_CREDENTIALS_FILE": "credentials", "AWS_CONFIG_FILE": "config"}
    return {name: str(tmp_path / file) for name, file in names.items()}


def test_a_profile_is_read_and_never_shown(tmp_path: Path) -> None:
    environ = files(tmp_path)
    found = read_profile(environ)
    assert (found.region, found.keys["access_key_id"]) == ("eu-west-1", "A")
    assert "secret" not in repr(found)
    work = read_profile({**environ, "AWS_PROFILE": "work"})
    assert (work.region, work.endpoint, work.keys["token"]) == ("eu-north-1", "http://127.0.0.1:9", "T")


def test_keys_that_another_program_renews_are_read_again(tmp_path: Path) -> None:
    environ = files(tmp_path)
    provide = renewing(environ)
    assert provide()["secret_access_key"] == "very-secret"
    (tmp_path / "credentials").write_text("[default]\naws_access_key_id = B\naws_secret_access_key = next\n")
    assert provide()["secret_access_key"] == "next"


def test_what_cannot_be_read_has_no_keys(tmp_path: Path) -> None:
    (tmp_path / "credentials").write_bytes(b"\xff no file of ours")
    environ = {"AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "credentials"), "HOME": str(tmp_path / "nowhere")}
    assert read_profile(environ).keys == {}
    # Half a pair is none.
    (tmp_path / "credentials").write_text("[default]\naws_access_key_id = B\n")
    assert read_profile(environ).keys == {}


def test_what_the_library_finds_by_itself_is_left_to_it() -> None:
    assert in_environment({"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"})
    assert not in_environment({"AWS_ACCESS_KEY_ID": "a"})
    assert asks_metadata({}) and not asks_metadata({"AWS_EC2_METADATA_DISABLED": "True"})
