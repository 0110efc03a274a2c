"""A mirror that is a directory, while another process removes from it and writes to it."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from unbroken.disk import LocalDisk, Node
from unbroken.files import Files
from unbroken.mirror.address import parse_address
from unbroken.mirror.folder import FolderClient


class Meanwhile(LocalDisk):
    """A disk on which something happens right before one directory is listed, or removed."""

    def __init__(self, operation: str, path: Path, happening: Callable[[], object]) -> None:
        self.moment = operation, path
        self.happening = happening

    def list_directory(self, path: Path) -> list[Node]:
        if self.moment == ("list", path):
            self.happening()
        return super().list_directory(path)

    def remove_directory(self, path: Path) -> None:
        if self.moment == ("remove", path):
            self.happening()
        super().remove_directory(path)


def mirror(root: Path, disk: Meanwhile) -> FolderClient:
    for name in ("checkpoint-2/manifest.json", "checkpoint-2/ranks/0", "checkpoint-4/manifest.json"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"12345678")
    return FolderClient(parse_address(root.as_uri()), Files(disk))


@pytest.mark.promise("M9")
@pytest.mark.parametrize("gone", ["checkpoint-2", "checkpoint-2/ranks"])
def test_what_another_process_removes_during_a_listing_is_not_listed(gone: str, tmp_path: Path) -> None:
    client = mirror(tmp_path, Meanwhile("list", tmp_path / gone, lambda: shutil.rmtree(tmp_path / "checkpoint-2")))
    listed = [found.key for found in client.listing("checkpoint-2")]
    assert listed == [] if gone == "checkpoint-2" else listed == ["checkpoint-2/manifest.json"]
    assert client.level("checkpoint-2") == ([], [])
    assert client.level("")[0] == ["checkpoint-4"]


@pytest.mark.promise("M9")
def test_a_file_that_another_process_puts_into_an_emptied_directory_stays(tmp_path: Path) -> None:
    directory = tmp_path / "checkpoint-4"
    client = mirror(tmp_path, Meanwhile("remove", directory, lambda: (directory / "new").write_bytes(b"new")))
    client.delete(["checkpoint-4/manifest.json"])
    assert [path.name for path in directory.iterdir()] == ["new"]
