"""Reading the files of another tool's checkpoint: torch files, safetensors, JSON. Nothing in them is executed.

Torch files are read as ``torch.load(weights_only=True)`` reads them. A class beyond that is read only if it is allowed
by name, and then as plain data: the class itself is never imported. Zip checksums are verified, which torch does not
do. Every problem is collected, so that one error lists all of them, and what was read is stamped, so that a writer that
is still at work is noticed.
"""

import errno
import pickle
import re
import struct
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Final, TypeGuard, cast

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from unbroken.errors import ForeignDamaged, NeedsClass, PackageMissing, StorageFailed
from unbroken.files import LOCAL
from unbroken.store.fields import parsed

_JSON_LIMIT_BYTES: Final = 64 << 20
# Modules whose functions run commands or code: objects of these are not data, allowed or not.
_DANGEROUS: Final = frozenset(
    {"builtins", "os", "posix", "nt", "sys", "subprocess", "importlib", "runpy", "shutil", "socket", "pty", "code"}
)
# What a file that is cut off, overwritten or made by hand has been seen to raise; torch promises no set of errors.
UNREADABLE: Final = (
    *(RuntimeError, ValueError, TypeError, LookupError, AttributeError, EOFError, OSError, AssertionError),
    *(ImportError, OverflowError, struct.error, pickle.UnpicklingError, zipfile.BadZipFile),
)
_GLOBAL: Final = re.compile(r"GLOBAL ([\w.]+)")


class PlainObject:
    """An object of a class that was allowed by name: its arguments and its state, and no behaviour."""

    name = ""
    args: tuple[object, ...]
    state: object = None

    def __new__(cls, *args: object) -> "PlainObject":  # noqa: D102 -- as unpickling calls it
        found = object.__new__(cls)
        found.args = args
        return found

    def __setstate__(self, state: object) -> None:
        self.state = state


def plain(value: object) -> object:
    """A value with every such object replaced by a dictionary of what it holds; a module by its named tensors."""
    if isinstance(value, PlainObject):
        if _is_module(value):
            return _module_tensors(value)
        kept: dict[str, object] = {"class": value.name}
        named = {"args": list(value.args), "state": value.state}
        return {**kept, **{key: plain(held) for key, held in named.items() if held}}
    if type(value) in (dict, OrderedDict):
        return {key: plain(held) for key, held in cast("dict[object, object]", value).items()}
    if type(value) is list:
        return [plain(held) for held in value]
    return tuple(plain(held) for held in value) if type(value) is tuple else value


def _is_module(value: object) -> TypeGuard[PlainObject]:
    """Whether an object is a pickled ``torch.nn.Module``, by what one holds."""
    if not isinstance(value, PlainObject) or not isinstance(value.state, dict):
        return False
    return all(isinstance(value.state.get(key), dict) for key in ("_parameters", "_buffers", "_modules"))


def _module_tensors(module: PlainObject, above: str = "") -> dict[str, torch.Tensor]:
    """What ``state_dict`` of a module gives: parameters, buffers that are saved, then those of its submodules."""
    state = cast("dict[str, Any]", module.state)
    # Before torch 1.6 a module had no such set.
    unsaved = state.get("_non_persistent_buffers_set", ())
    own = {**state["_parameters"], **{name: held for name, held in state["_buffers"].items() if name not in unsaved}}
    found = {f"{above}{name}": held for name, held in own.items() if isinstance(held, torch.Tensor)}
    for name, inner in state["_modules"].items():
        if _is_module(inner):
            found |= _module_tensors(inner, f"{above}{name}.")
        elif inner is not None:
            called = inner.name if isinstance(inner, PlainObject) else type(inner).__name__
            raise ValueError(
                f"{above}{name} of its pickled module is an object of {called}, whose tensors are not known"
            )
    return found


@dataclass
class ForeignFiles:
    """The files of one checkpoint as they are read; ``root`` is what the user named."""

    root: Path
    allowed: Collection[str] = ()
    problems: list[str] = field(default_factory=list)
    classes: list[tuple[str, str]] = field(default_factory=list)
    _stamps: dict[Path, tuple[int, int]] = field(default_factory=dict)

    def torch_file(self, path: Path) -> Any:  # noqa: ANN401 -- whatever the file holds
        """What a torch file holds, tensors on the CPU; None if it cannot be read, which is noted."""
        self.stamp(path)
        try:
            self._check_zip(path)
            return self.torch_bytes(path, self._shown(path))
        except UNREADABLE as wrong:
            self.note(path, wrong)
        return None

    def torch_bytes(self, source: Path | IO[bytes], shown: str) -> Any:  # noqa: ANN401
        """What torch saved into a file or into a range of one; None if it needs a class that is not allowed.

        Raises:
            Exception: it cannot be read; one of ``UNREADABLE``.
        """
        try:
            with safe_globals(self._globals()), warnings.catch_warnings():
                # Of pickle protocols that torch itself does not write.
                warnings.simplefilter("ignore")
                return plain(torch.load(source, map_location="cpu", weights_only=True))
        except pickle.UnpicklingError as refused:
            needed = self._needed(source, refused)
            if not needed:
                raise
            self._note_classes(shown, needed)
            return None

    def safetensors(self, path: Path) -> dict[str, torch.Tensor]:
        """The tensors of a safetensors file; empty if it cannot be read, which is noted.

        Raises:
            PackageMissing: safetensors is not installed.
        """
        try:
            from safetensors import SafetensorError
            from safetensors.torch import load_file
        except ImportError:
            raise PackageMissing(package="safetensors", purpose="reading .safetensors") from None
        self.stamp(path)
        try:
            return dict(load_file(path))
        except (SafetensorError, *UNREADABLE) as wrong:
            self.note(path, wrong)
        return {}

    def json(self, path: Path) -> dict[str, Any]:
        """A JSON object; empty if it cannot be read as one, which is noted."""
        self.stamp(path)
        try:
            found = parsed(LOCAL.read_bytes(path, limit_bytes=_JSON_LIMIT_BYTES))
            if isinstance(found, dict):
                return found
            self.problems.append(f"{self._shown(path)}: it is not a JSON object")
        except (ValueError, StorageFailed) as wrong:
            self.note(path, wrong)
        return {}

    def note(self, path: Path, wrong: BaseException) -> None:
        """Note that a file cannot be read, and why."""
        self.problems.append(f"{self._shown(path)}: {_reason(wrong)[:200]}")

    def has_read(self, path: Path) -> bool:
        """Whether a file was read."""
        return path in self._stamps

    def stamp(self, path: Path) -> None:
        """Remember size and time of a file, the first time it is read."""
        if (found := LOCAL.find(path)) is not None:
            self._stamps.setdefault(path, (found.size_bytes, found.modified_ns))

    def settle(self) -> None:
        """Raise what was noted, everything at once.

        Raises:
            ForeignDamaged: files cannot be read, or changed while they were read.
            NeedsClass: pickles hold objects of classes that were not allowed.
        """
        for path, before in self._stamps.items():
            found = LOCAL.find(path)
            if found is None or (found.size_bytes, found.modified_ns) != before:
                self.problems.append(f"{self._shown(path)}: changed while it was read; let its writer finish first")
        if self.problems:
            raise ForeignDamaged(path=self.root, problems=tuple(dict.fromkeys(self.problems)))
        if self.classes:
            raise NeedsClass(path=self.root, classes=tuple(dict.fromkeys(self.classes)))

    def _shown(self, path: Path) -> str:
        return str(path.relative_to(self.root)) if path != self.root and path.is_relative_to(self.root) else path.name

    def _globals(self) -> list[Any]:
        allowed = [(type("PlainObject", (PlainObject,), {"name": name}), name) for name in self.allowed]
        return [*_of_numpy(), dict, (_as_dict, "collections.defaultdict"), *allowed]

    def _needed(self, source: Path | IO[bytes], refused: pickle.UnpicklingError) -> list[str]:
        """The globals that a refused pickle names and that are not allowed."""
        try:
            if not isinstance(source, Path):
                source.seek(0)
            with safe_globals(self._globals()):
                return sorted(get_unsafe_globals_in_checkpoint(source))
        except UNREADABLE:
            # Of the format before torch 1.6 only the first one is known, from the message.
            return _GLOBAL.findall(str(refused))[:1]

    def _note_classes(self, shown: str, needed: Collection[str]) -> None:
        for name in needed:
            if name.partition(".")[0] in _DANGEROUS:
                said = f"it calls {name} when it is unpickled, which may run any code; it was not executed"
                self.problems.append(f"{shown}: {said}")
            else:
                self.classes.append((shown, name))

    def _check_zip(self, path: Path) -> None:
        """Verify the checksums of a zip file; entries without one, which torch can be told to write, pass."""
        if not zipfile.is_zipfile(path):
            return
        with zipfile.ZipFile(path) as archive:
            check_zip(archive)


def _reason(wrong: BaseException) -> str:
    """Why a file cannot be read, in one line."""
    said = str(wrong).strip()
    if "TorchScript" in said:
        return "it is a TorchScript archive; save what state_dict() of the model in it returns"
    if "inline_container" in said or "PytorchStreamReader" in said:
        return "it is cut off, or a zip file that torch.save did not write"
    if isinstance(wrong, pickle.UnpicklingError) and "\n" in said:
        # torch's message is several lines of advice; the cause, if it knows one, is in the last paragraph.
        causes = [line for line in said.splitlines() if "GLOBAL" in line]
        return causes[-1] if causes else "it is not a file that torch.load reads"
    if isinstance(wrong, EOFError | LookupError | struct.error) or getattr(wrong, "errno", None) == errno.EINVAL:
        # What the readers raise at bytes they do not expect says nothing to a user.
        return "it is cut off, or not a file that torch.load reads"
    return said.partition("\n")[0] or type(wrong).__name__


def check_zip(archive: zipfile.ZipFile) -> None:
    """Pass if every entry of an archive has the checksum that was stored for it.

    Raises:
        BadZipFile: one has not.
    """
    for entry in archive.infolist():
        if entry.CRC:
            with archive.open(name=entry, mode="r") as held:
                while held.read(1 << 20):
                    pass


def _as_dict(*factory: object) -> dict[object, object]:
    """What stands for a defaultdict, in which optimizers keep their state: torch reads no other class of mapping."""
    del factory
    return {}


def _of_numpy() -> list[Any]:
    """What arrays of numpy are pickled with: data alone, under the names of old and new versions."""
    try:
        import numpy as np
        from numpy._core.multiarray import _reconstruct, scalar
    except ImportError:
        return []
    names = ("numpy.core.multiarray", "numpy._core.multiarray")
    kinds = [type(np.dtype(kind)) for kind in "?bBhHiIlLqQefdFDSU"]
    functions = [(held, f"{module}.{held.__name__}") for module in names for held in (_reconstruct, scalar)]
    return [np.ndarray, np.dtype, *functions, *kinds]
