"""Whose notices a job listens to, and which of its processes does. Pure: environment and files are handed in."""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from unbroken.errors import BadSpot, StorageFailed
from unbroken.files import LOCAL, Files
from unbroken.launch.spot.notices import CLOUDS, Cloud

VARIABLE: Final = "UNBROKEN_SPOT"
AUTO: Final = "auto"
OFF: Final = "off"
WORDS: Final = (*CLOUDS, AUTO, OFF)
DMI: Final = Path("/sys/class/dmi/id")
# Who started the processes of a node says which of them is which; each launcher in its own variable.
_LOCAL_RANKS: Final = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK")
_LIMIT_BYTES: Final = 4096
# What firmware calls a machine of a cloud; Azure's tag tells it from any other machine under Hyper-V.
_MARKS: Final[tuple[tuple[str, str, Cloud], ...]] = (
    ("sys_vendor", "amazon ec2", "aws"),
    ("bios_version", "amazon", "aws"),
    ("product_name", "google compute engine", "gcp"),
    ("chassis_asset_tag", "7783-7084-3265-9085-8269-3286-77", "azure"),
)


def choose(setting: str | None, environ: Mapping[str, str], dmi: Path = DMI, files: Files = LOCAL) -> Cloud | None:
    """The cloud to listen to: as set, else by ``UNBROKEN_SPOT``, else none; ``auto`` looks at the firmware's names.

    Raises:
        BadSpot: the word is not known.
    """
    source, word = ("Settings.spot", setting) if setting else (VARIABLE, environ.get(VARIABLE, "").strip())
    if word == AUTO:
        return detect(dmi, files)
    if not word or word == OFF:
        return None
    for cloud in CLOUDS:
        if word == cloud:
            return cloud
    raise BadSpot(source=source, value=word, complaint=f"it is none of {', '.join(WORDS)}")


def detect(dmi: Path = DMI, files: Files = LOCAL) -> Cloud | None:
    """The cloud that this machine is of, by the names its firmware gives; the network is never asked."""
    for file, mark, cloud in _MARKS:
        try:
            text = files.read_bytes(dmi / file, limit_bytes=_LIMIT_BYTES)
        except StorageFailed:
            # Not there, or not for us to read: then it tells nothing.
            continue
        if mark in text.decode("ascii", errors="replace").lower():
            return cloud
    return None


def listens(environ: Mapping[str, str]) -> bool:
    """Whether this process is to listen: the first one of its node, or any that does not know its place there.

    A notice concerns one node, so the first rank of the world alone would not hear those of the others.
    """
    places = (environ.get(variable, "").strip() for variable in _LOCAL_RANKS)
    return next((place for place in places if place), "0") == "0"
