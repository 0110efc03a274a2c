"""Compiled code that the next job finds again, also on another node.

torch keeps compiled code in a directory below the temporary one, which a compute node loses between jobs. So it gets a
directory per kind of job there, and what a job has compiled is kept as one file in the user's cache folder
(``~/.cache/unbroken/compiled``), which nodes of a cluster share. The next job unpacks it before it compiles. One file,
because a shared file system answers one request faster than hundreds, and may not have the locks that torch uses.

Loading compiled code runs it, so both directories must belong to this user alone; the code is never kept in the run
directory, which may come from somebody else. If anything here fails, torch compiles as it would have anyway.
"""

import contextlib
import gzip
import hashlib
import io
import json
import os
import platform
import stat
import tarfile
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Final

import torch

from unbroken.config import Config
from unbroken.disk import NodeKind
from unbroken.doctor.self_test_process import cache_folder
from unbroken.errors import StorageFailed
from unbroken.exact.self_tested import make_key
from unbroken.files import LOCAL, Files
from unbroken.gpt.device import RankDevice
from unbroken.quoting.log import logger

_log = logger(__name__)
VARIABLE: Final = "TORCHINDUCTOR_CACHE_DIR"
SUFFIX: Final = ".tar.gz"
# What a file may hold and how many are kept: the folder is in a home directory, which may have a quota.
_MOST_BYTES: Final = 256 << 20
_MOST_KEPT: Final = 8
_DIGEST_BYTES: Final = 32
_LOCKS: Final = "locks"


def is_private(directory: Path) -> bool:
    """Whether a directory belongs to this user, and nobody else can write into it."""
    try:
        found = directory.lstat()
    except OSError:
        return False
    others = stat.S_IWGRP | stat.S_IWOTH
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & others


@dataclass
class CompiledCode:
    """The compiled code of one kind of job: the directory where torch has it, and the file that outlives the node."""

    live: Path
    kept: Path
    files: Files = LOCAL
    is_private: Callable[[Path], bool] = is_private
    _known: set[str] = field(default_factory=set)

    def unpack(self) -> None:
        """Write what is kept and not yet in the live directory; several processes may do so at once."""
        try:
            content = self._read()
        except (StorageFailed, tarfile.TarError, EOFError, zlib.error, OSError) as refused:
            _log.info("compiled code of earlier jobs is not used: %s: %s", self.kept, refused)
            return
        self._known = set(content)
        for name, data in content.items():
            path = self.live / name
            with _logged(f"could not unpack {name}"):
                if self.files.find(path) is None:
                    self.files.make_directory(path.parent)
                    # crash here: some of the files; the others are compiled, or unpacked by the next job.
                    self.files.replace(path, data, scratch=f"{path.name}.{os.getpid()}.partial", durable=False)

    def _read(self) -> dict[str, bytes]:
        if self.files.find(self.kept) is None or not self.is_private(self.kept.parent):
            return {}
        data = self.files.read_bytes(self.kept, limit_bytes=_MOST_BYTES + _DIGEST_BYTES)
        digest, body = data[:_DIGEST_BYTES], data[_DIGEST_BYTES:]
        if hashlib.sha256(body).digest() != digest:
            return {}
        found: dict[str, bytes] = {}
        with tarfile.open(fileobj=io.BytesIO(gzip.decompress(body)), mode="r:") as archive:
            for member in archive:
                place = PurePosixPath(member.name)
                taken = archive.extractfile(member) if member.isreg() else None
                if taken is not None and not place.is_absolute() and ".." not in place.parts:
                    found[member.name] = taken.read()
        return found

    def keep(self) -> None:
        """Keep what was compiled, if there is more of it than was unpacked."""
        with _logged("compiled code is not kept for the next job"):
            names = sorted(_names(self.live, self.files))
            if not names or self._known.issuperset(names):
                return
            body = gzip.compress(self._packed(names), compresslevel=1)
            self._known.update(names)
            if len(body) > _MOST_BYTES or not self.is_private(self.kept.parent):
                return
            data = hashlib.sha256(body).digest() + body
            # crash here: the file before, or a half one, which its digest gives away.
            self.files.replace(self.kept, data, scratch=f"{self.kept.name}.partial", durable=False)
            self._trim()

    def _packed(self, names: list[str]) -> bytes:
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as archive:
            for name in names:
                data = self.files.read_bytes(self.live / name, limit_bytes=_MOST_BYTES)
                member = tarfile.TarInfo(name)
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
        return packed.getvalue()

    def _trim(self) -> None:
        """Remove the oldest files beyond the number that is kept."""
        folder = self.kept.parent
        found = [
            (status.modified_ns, node.name)
            for node in self.files.list_directory(folder)
            if node.name.endswith(SUFFIX) and (status := self.files.find(folder / node.name)) is not None
        ]
        for _, name in sorted(found, reverse=True)[_MOST_KEPT:]:
            # crash here: one file more or less.
            self.files.remove_file(folder / name)


def find_compiled_code(
    config: Config, vocab_size: int, place: RankDevice, dtype: torch.dtype | None
) -> CompiledCode | None:
    """Let torch keep its compiled code where the next job finds it, and unpack that of earlier jobs. Collective."""
    found = compiled_code(config, vocab_size, place.device, dtype, os.environ)
    if found is not None:
        os.environ[VARIABLE] = str(found.live)
        if os.environ.get("LOCAL_RANK", "0") == "0":
            # Once on each node.
            found.unpack()
    # Nobody compiles before everything is there.
    place.world.all_or_none(lambda: None)
    return found


def compiled_code(
    config: Config, vocab_size: int, device: torch.device, dtype: torch.dtype | None, environ: Mapping[str, str]
) -> CompiledCode | None:
    """Where the compiled code of this job is; both directories are made.

    None if nothing is compiled, if ``TORCHINDUCTOR_CACHE_DIR`` says where it is to be, or if there is no directory that
    belongs to this user alone.
    """
    root = Path(tempfile.gettempdir(), f"unbroken-compiled-{os.getuid()}")
    folder = cache_folder(environ)
    if not config.training.compile or folder is None or _is_chosen(environ.get(VARIABLE), root):
        return None
    kept = folder.with_name("compiled")
    name = _name(config, vocab_size, device, dtype)
    if not (make_private(root) and make_private(kept)):
        _log.info("compiled code is not kept: %s and %s must belong to this user alone", root, kept)
        return None
    return CompiledCode(root / name, kept / f"{name}{SUFFIX}")


def _is_chosen(directory: str | None, root: Path) -> bool:
    """Whether a user has named the directory: torch sets the variable too, to its own, when it is first asked."""
    if directory is None:
        return False
    path = Path(directory)
    is_of_torch = path.parent == root.parent and path.name.startswith("torchinductor_")
    return not is_of_torch and not path.is_relative_to(root)


def _name(config: Config, vocab_size: int, device: torch.device, dtype: torch.dtype | None) -> str:
    """A digest of what compiled code depends on: build of torch, processor and device, and what is compiled.

    torch's own keys do not tell processors apart, though code for a CPU is compiled for the one at hand.
    """
    training = config.training
    compiled = {
        "python": platform.python_version(),
        "model": asdict(config.model),
        "vocab_size": vocab_size,
        "dtype": str(dtype),
        "batch": [training.per_device_batch_size, config.data.max_length],
        "sharding": training.sharding,
        "gradient_checkpointing": training.gradient_checkpointing,
        "exact": training.exact,
    }
    key = {**make_key(device), "compiled": compiled}
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]


def make_private(directory: Path, files: Files = LOCAL) -> bool:
    """Make a directory that only this user can enter; says whether it is one that only this user writes into."""
    before = os.umask(0o077)
    try:
        # crash here: an empty directory.
        files.make_directory(directory)
    except StorageFailed:
        return False
    finally:
        os.umask(before)
    return is_private(directory)


def _names(directory: Path, files: Files, below: str = "") -> Iterator[str]:
    """Relative names of all files but locks and those that are being written."""
    for node in files.list_present(directory):
        if node.kind is NodeKind.DIRECTORY and node.name != _LOCKS:
            yield from _names(directory / node.name, files, f"{below}{node.name}/")
        elif node.kind is NodeKind.FILE and not node.name.endswith((".lock", ".partial", ".tmp")):
            yield f"{below}{node.name}"


@contextlib.contextmanager
def _logged(what: str) -> Iterator[None]:
    try:
        yield
    except StorageFailed as refused:
        _log.info("%s: could not %s: %s", what, refused.operation, refused.cause)
