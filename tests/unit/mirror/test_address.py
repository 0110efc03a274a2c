"""Addresses of mirrors: what is one, and that no secret gets through in one."""

from pathlib import Path

import pytest

from unbroken.errors import BadMirror
from unbroken.mirror.address import address_of, addresses_in, is_url, parse_address
from unbroken.mirror.remote import RemotePath


@pytest.mark.parametrize(
    ("text", "scheme", "bucket", "prefix"),
    [
        ("s3://bucket/runs/a/", "s3", "bucket", "runs/a"),
        ("gs://bucket", "gs", "bucket", ""),
        ("az://container/a", "az", "container", "a"),
        ("file:///shared/my%20runs/a", "file", "", "shared/my runs/a"),
    ],
)
def test_an_address_has_a_scheme_a_bucket_and_a_prefix(text: str, scheme: str, bucket: str, prefix: str) -> None:
    found = parse_address(text)
    assert (found.scheme, found.bucket, found.prefix) == (scheme, bucket, prefix)
    assert is_url(text)
    # The same text from any spelling, since the ledger knows a mirror by its text.
    assert parse_address(str(found).replace(" ", "%20")) == found


@pytest.mark.parametrize(
    "text",
    [
        *(
            "runs/a",
            "/shared/a",
            "ftp://host/a",
            "s3://",
            "s3:///a",
            "s3://b/a",
            "s3://bucket/../a",
            "s3://bucket/a,s3://bucket/b",
        ),
        *("file://shared/a", "file:///", "s3://bucket/a\n", "s3://AKIA:secret@bucket/a", "s3://bucket/a?key=secret"),
    ],
)
def test_everything_else_is_refused_and_no_secret_is_repeated(text: str) -> None:
    with pytest.raises(BadMirror) as refused:
        parse_address(text)
    assert "secret" not in f"{refused.value} {refused.value.at()} {refused.value!r}"


@pytest.mark.parametrize("name", ["plain", "50% of it", "a%20b", "what?", "a#1"])
def test_the_address_of_a_directory_reads_back_as_that_directory(name: str) -> None:
    directory = Path("/shared") / name
    assert parse_address(str(address_of(directory))).directory == directory


def test_several_addresses_are_separated_by_commas() -> None:
    assert addresses_in(" s3://a/b ,file:///c,, s3://a/b") == ["s3://a/b", "file:///c"]


def test_an_address_as_a_path_keeps_its_form() -> None:
    root = RemotePath("s3://bucket/runs/a")
    assert str(root / "checkpoints" / "x") == "s3://bucket/runs/a/checkpoints/x"
    assert str((root / "x").parent) == "s3://bucket/runs/a" and root in (root / "x").parents
    assert str(RemotePath("file:///shared/a") / "b") == "file:///shared/a/b"
    assert root.absolute() is root and root.resolve() is root and root.is_absolute()
