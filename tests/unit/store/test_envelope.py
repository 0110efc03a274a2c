"""The envelope: no other bytes than those that were sealed are opened, and one value has one spelling."""

from pathlib import Path

import pytest

from unbroken.files import LOCAL
from unbroken.store.digest import digest_bytes
from unbroken.store.envelope import (
    Envelope,
    begins_one,
    canonical,
    from_canonical,
    opened,
    opened_bare,
    sealed,
    sealed_bare,
)
from unbroken.store.fields import Malformed

BODY = b'{"a":[1,",\\"digest\\":\\"00\\"}"]}'
WHOLE = sealed(BODY, "unbroken.test/1")


def test_what_was_sealed_is_opened() -> None:
    found = opened(WHOLE)
    assert found == Envelope(BODY, "xxh3-128", digest_bytes(BODY).hex(), "unbroken.test/1")
    assert found.is_verified
    assert opened_bare(sealed_bare(BODY)) == BODY


def test_an_envelope_within_a_body_is_only_a_body() -> None:
    found = opened(sealed(WHOLE, "unbroken.test/2"))
    assert found is not None
    assert (found.body, found.form, found.is_verified) == (WHOLE, "unbroken.test/2", True)
    assert opened_bare(sealed_bare(sealed_bare(BODY))) == sealed_bare(BODY)


def test_every_flipped_bit_and_every_cut_is_seen() -> None:
    for data in (WHOLE, sealed_bare(BODY)):
        changed = [
            data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :] for at in range(len(data)) for bit in range(8)
        ]
        for other in [*changed, *(data[:end] for end in range(len(data))), data + b"\n", b" " + data]:
            assert opened_bare(other) is None
            found = opened(other)
            # The names of the algorithm and of the format are for the reader to know.
            is_same = found is not None and (found.algorithm, found.form) == ("xxh3-128", "unbroken.test/1")
            assert found is None or not is_same or not found.is_verified


def test_the_two_kinds_are_not_taken_for_each_other() -> None:
    assert opened(sealed_bare(BODY)) is None
    assert opened_bare(WHOLE) is None


@pytest.mark.parametrize("data", [b"", b'{"body":', b'{"bodY":{}', b"\0" * 8])
def test_a_file_of_another_tool_does_not_begin_like_ours(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_bytes(data)
    assert begins_one(LOCAL, tmp_path / "manifest.json") == (data == b'{"body":')


@pytest.mark.parametrize("data", [b'{"a": 1}', b'{"b":1,"a":2}', b'{"a":1,"a":1}', b'"\\u0061"', b"1.50", b"[NaN]"])
def test_a_value_has_one_spelling(data: bytes) -> None:
    with pytest.raises((Malformed, ValueError)):
        from_canonical(data)


def test_a_value_makes_the_round_trip() -> None:
    value = {"b": [1, 2.5, None, True], "a": "Zürich"}
    assert canonical(value) == '{"a":"Zürich","b":[1,2.5,null,true]}'.encode()
    assert from_canonical(canonical(value)) == value
