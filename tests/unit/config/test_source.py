"""Files become nodes with lines; unreadable and hostile ones become one clear error."""

import os
from pathlib import Path

import pytest
import yaml

from unbroken.config.source import MAX_BYTES, Mapping, Node, Scalar, parse, read
from unbroken.errors import ConfigUnreadable, PathMissing, render


def flat(node: Node | None) -> object:
    """The texts alone, for comparison."""
    match node:
        case None:
            return None
        case Scalar():
            return node.text
        case Mapping():
            return {key.text: flat(value) for key, value in node.entries}
    return [flat(item) for item in node.items]


def written(folder: Path, data: bytes, name: str = "run.yaml") -> Path:
    path = folder / name
    path.write_bytes(data)
    return path


def test_every_node_knows_its_line() -> None:
    root = parse("a:\n  b: 1\n\n  c: [x,\n    y]\n", "run.yaml")
    assert isinstance(root, Mapping)
    inner = root.entries[0][1]
    assert isinstance(inner, Mapping)
    assert [(key.text, str(key.place)) for key, _ in inner.entries] == [("b", "run.yaml:2"), ("c", "run.yaml:4")]


def test_quotes_are_remembered() -> None:
    root = parse("a: 12\nb: \"12\"\nc: '12'\nd: |\n  12\n", "run.yaml")
    assert isinstance(root, Mapping)
    assert [isinstance(node, Scalar) and node.is_plain for _, node in root.entries] == [True, False, False, False]


def test_an_alias_stands_for_what_its_anchor_marked() -> None:
    assert flat(parse("a: &x {b: 1}\nc: *x\n", "run.yaml")) == {"a": {"b": "1"}, "c": {"b": "1"}}


def test_a_merge_adds_what_is_not_written_out() -> None:
    text = "a: &a {x: 1, y: 2}\nb: &b {y: 3, z: 4}\nc: {<<: [*a, *b], x: 9}\nd:\n  <<: *b\n"
    found = flat(parse(text, "run.yaml"))
    assert isinstance(found, dict)
    assert found["c"] == {"x": "9", "y": "2", "z": "4"}
    assert found["d"] == {"y": "3", "z": "4"}


def test_json_is_read_with_tabs_escapes_and_characters_that_yaml_refuses() -> None:
    text = '{\n\t"a":\t"\\u00e9\\ud83d\\ude00\\/\\\\ud83d",\t"b":[1,true,null,"x\u2028y\x7f"]}'
    assert flat(parse(text, "run.json")) == {"a": "é😀/\\ud83d", "b": ["1", "true", "null", "x\u2028y\x7f"]}


def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path: Path) -> None:
    assert flat(read(written(tmp_path, b"\xef\xbb\xbfmodel:\n"))) == {"model": ""}


def test_a_config_may_be_a_link_or_a_pipe(tmp_path: Path) -> None:
    target = written(tmp_path, b"model: {}\n", "target.yaml")
    link = tmp_path / "link.yaml"
    link.symlink_to(target)
    assert flat(read(link)) == {"model": {}}
    reader, writer = os.pipe()
    os.write(writer, b"data: {}\n")
    os.close(writer)
    try:
        assert flat(read(Path(f"/dev/fd/{reader}"))) == {"data": {}}
    finally:
        os.close(reader)


UNREADABLE = {
    "empty": (b"", "empty", None),
    "only comments": (b"# nothing\n", "empty", None),
    "list": (b"\n- a\n", "must be a mapping", 2),
    "text": (b"abc", "must be a mapping", 1),
    "binary": (b"\x7fELF\0\0", "binary", None),
    "not utf-8": (b"model:\n  x: caf\xe9\n", "not UTF-8", 2),
    "open bracket": (b"model: [\n", "expected", 2),
    "colon in text": (b"a: 1\nb: c: d\n", "not allowed", 2),
    "tab as indent": (b"a:\n\tb: 1\n", "token", 2),
    "control character": (b"a: 1\nb: \x01\n", "#x0001", 2),
    "control character after many others": ("a: éééééé\nb: 😀😀\nc: \x02\n".encode(), "#x0002", 3),
    "two documents": (b"a: 1\n---\nb: 1\n", "more than one document", 2),
    "unknown alias": (b"a: *b\n", "alias", 1),
    "alias of itself": (b"a: &a\n  b: *a\n", "alias", 2),
    "python object": (b"a: !!python/object/apply:os.system [ls]\n", "tag", 1),
    "own tag": (b"a: !thing 3\n", "tag", 1),
    "list as key": (b"? [a]\n: 1\n", "key", 1),
    "deep flow": (b"a: " + b"[" * 100_000, "deep", 1),
    "deep blocks": (b"\n".join(b" " * i + b"a:" for i in range(1000)), "deep", 33),
    "too large": (b"#" * (MAX_BYTES + 1), "larger", None),
}


@pytest.mark.parametrize("case", UNREADABLE)
def test_an_unreadable_file_is_one_clear_error_with_its_line(case: str, tmp_path: Path) -> None:
    data, complaint, line = UNREADABLE[case]
    with pytest.raises(ConfigUnreadable, match=complaint) as caught:
        read(written(tmp_path, data))
    assert caught.value.line == line
    assert caught.value.exit_code == 2
    assert len(render(caught.value).splitlines()) <= 8


@pytest.mark.parametrize("case", UNREADABLE)
def test_a_machine_without_the_fast_parser_refuses_the_same_files(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(yaml, "CSafeLoader", raising=False)
    with pytest.raises(ConfigUnreadable):
        read(written(tmp_path, UNREADABLE[case][0]))


def test_a_bomb_of_aliases_is_refused_while_it_is_read(tmp_path: Path) -> None:
    rows = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    rows += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 40)]
    with pytest.raises(ConfigUnreadable, match="more than 20,000 values"):
        read(written(tmp_path, "\n".join(rows).encode()))


def test_a_bomb_of_merges_is_refused_while_it_is_read(tmp_path: Path) -> None:
    inner = ", ".join(f"k{i}: 1" for i in range(1000))
    outer = "\n".join(f"b{i}: {{<<: *a, c: 1}}" for i in range(1000))
    with pytest.raises(ConfigUnreadable, match="more than 20,000 values"):
        read(written(tmp_path, f"a: &a {{{inner}}}\n{outer}\n".encode()))


def test_a_directory_is_reported_as_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigUnreadable, match="a directory"):
        read(tmp_path)


@pytest.mark.parametrize("name", ["missing.yaml", "run.yaml/x", "nul\0.yaml"])
def test_a_missing_file_is_reported_as_missing(name: str, tmp_path: Path) -> None:
    written(tmp_path, b"model: {}\n")
    with pytest.raises(PathMissing):
        read(tmp_path / name)


def test_an_endless_device_is_read_only_so_far() -> None:
    with pytest.raises(ConfigUnreadable, match="larger"):
        read(Path("/dev/zero"))
