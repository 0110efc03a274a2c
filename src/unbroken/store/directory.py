"""Where a store is: one directory, and the disk it is on."""

from dataclasses import dataclass
from pathlib import Path

from unbroken.files import LOCAL, Files
from unbroken.store.manifest import FILE_LIMIT_BYTES, Manifest, decode, decode_outline
from unbroken.store.names import MANIFEST


@dataclass(frozen=True)
class Store:
    """A directory of checkpoints."""

    root: Path
    files: Files = LOCAL

    def path(self, name: str) -> Path:
        """The path of a name in the store."""
        return self.root / name

    def read_manifest(self, name: str) -> Manifest:
        """The manifest of one checkpoint, verified by its own digest.

        Raises:
            ManifestDamaged: it is not what a commit wrote.
            FormatUnknown: another version wrote it.
            UnsafeName: it names a file outside the checkpoint.
            StorageFailed: it cannot be read.
        """
        path = self.path(name) / MANIFEST
        return decode(self.files.read_bytes(path, limit_bytes=FILE_LIMIT_BYTES), path)

    def read_outline(self, name: str) -> Manifest:
        """The same without the tensors, for whoever does not need them: from the second time on it is quick.

        Raises:
            UnbrokenError: as ``read_manifest`` raises it.
        """
        path = self.path(name) / MANIFEST
        return decode_outline(self.files.read_bytes(path, limit_bytes=FILE_LIMIT_BYTES), path)
