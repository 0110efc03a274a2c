"""What a manifest is asked to describe, and everything that stands in its way, all at once."""

import math
import posixpath
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final, Literal

from unbroken.errors import ManifestUnfit
from unbroken.quoting import amounts
from unbroken.records.deadline import UNMEASURED_S, learned_reserve
from unbroken.records.journal import Event

# ---- the grace period ----

# Between the launcher's own limit and the kubelet's: what it takes to say how it ended.
MARGIN_S: Final = 15
_ROUNDED_TO_S: Final = 10
_LEAST_S: Final = 30


@dataclass(frozen=True)
class Grace:
    """Seconds from SIGTERM to SIGKILL, how many a save needs of them, and how that is known."""

    seconds: int
    needed_s: float
    because: str

    @property
    def shutdown_timeout_s(self) -> int:
        """How long the launcher waits, so that it ends before it is killed."""
        return max(self.seconds - MARGIN_S, 1)


def grace_of(facts: Iterable[Event], asked_s: int | None = None) -> Grace:
    """The grace period that a run's journal asks for, or the one a person does; a run without saves gets a guess."""
    reserve = learned_reserve(facts)
    is_measured = bool(reserve.saves_s)
    needed_s = reserve.seconds() if is_measured else 0.0
    learned_s = max(_LEAST_S, _rounded_up((needed_s if is_measured else UNMEASURED_S) + MARGIN_S))
    if is_measured:
        slowest = amounts.duration(max(reserve.saves_s))
        because = f"the slowest of the last {amounts.plural(len(reserve.saves_s), 'save')} took {slowest}"
    else:
        because = "no save was measured yet; make the manifest again when one was"
    return Grace(learned_s if asked_s is None else asked_s, needed_s, because)


def _rounded_up(seconds: float) -> int:
    return math.ceil(seconds / _ROUNDED_TO_S) * _ROUNDED_TO_S


# ---- what is asked for ----

Kind = Literal["job", "jobset", "pytorchjob"]
KINDS: Final[tuple[Kind, ...]] = ("job", "jobset", "pytorchjob")
# What a pod's host name adds to the manifest's name, before the number of the node.
SUFFIXES: Final[dict[Kind, str]] = {"job": "-", "jobset": "-node-0-", "pytorchjob": "-worker-"}
_LABEL_LENGTH: Final = 63
# RFC 1035, the narrower of the two forms: the name is that of a service too.
_LABEL: Final = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
# RFC 1123: what claims, secrets and classes of others may be called.
_SUBDOMAIN: Final = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_SUBDOMAIN_LENGTH: Final = 253
_IMAGE: Final = re.compile(r"[a-zA-Z0-9][\w.\-/:]*(@sha256:[0-9a-f]{64})?")
_QUANTITY: Final = re.compile(r"(?=.*[1-9])\d+(\.\d+)?(m|k|[KMGTPE]i?|[eE]\d{1,2})?")


@dataclass(frozen=True, kw_only=True)
class Program:
    """What runs in a pod: ``unbroken train`` with its words, or ``unbroken run`` with a script's.

    Attributes:
        verb: ``train`` or ``run``.
        words: the config and its overrides, or the script and its arguments.
        run: the run directory, as the program knows it.
        config: the config's text, which goes along in the manifest; None for a script, which is in the image.
        config_file: what its file is called in the pod.
    """

    verb: Literal["train", "run"]
    words: tuple[str, ...]
    run: str
    config: str | None = None
    config_file: str = "config.yaml"


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """Everything a manifest is made from."""

    kind: Kind
    name: str
    image: str
    program: Program
    grace: Grace
    namespace: str | None = None
    nodes: int = 1
    gpus: int = 0
    cpu: str | None = None
    memory: str | None = None
    shared_memory: str = "8Gi"
    claim: str = ""
    mount: str = "/runs"
    storage: str | None = None
    storage_class: str | None = None
    secrets: tuple[str, ...] = ()
    restarts: int = 20
    user: int = 1000

    @property
    def claim_name(self) -> str:
        """The claim that the run directory lies on."""
        return self.claim or self.name


def named_after(run: str) -> str:
    """A name for the manifest of a run: the last part of its directory, as far as a label can hold it."""
    last = posixpath.basename(posixpath.normpath(run)).lower()
    return re.sub(r"[^a-z0-9]+", "-", last).strip("-") or "run"


def require_fit(wanted: Wanted) -> None:
    """Pass if a cluster would take the manifest and the run would outlive its pods.

    Raises:
        ManifestUnfit: with everything that is wrong.
    """
    found = (*_wrong_names(wanted), *_wrong_amounts(wanted), *_wrong_places(wanted))
    if found:
        raise ManifestUnfit(problems=found)


def _wrong_names(wanted: Wanted) -> Iterator[str]:
    longest = len(wanted.name + SUFFIXES[wanted.kind] + str(max(wanted.nodes - 1, 0)))
    if not _LABEL.fullmatch(wanted.name):
        yield f"--name '{wanted.name}' is not lower-case letters, digits and dashes, beginning with a letter"
    elif longest > _LABEL_LENGTH:
        yield f"--name '{wanted.name}' is too long: a pod's name would have {longest} characters, {_LABEL_LENGTH} fit"
    if wanted.namespace is not None and not _LABEL.fullmatch(wanted.namespace):
        yield f"--namespace '{wanted.namespace}' is not lower-case letters, digits and dashes, beginning with a letter"
    others = (("--claim", wanted.claim), ("--storage-class", wanted.storage_class))
    for option, name in (*others, *(("--secret", secret) for secret in wanted.secrets)):
        if name and not (_SUBDOMAIN.fullmatch(name) and len(name) <= _SUBDOMAIN_LENGTH):
            yield f"{option} '{name}' is no name of an object: lower-case letters, digits, dashes and dots"
    if not wanted.image:
        yield "--image is missing: the image that has unbroken, torch and your code in it"
    elif not _IMAGE.fullmatch(wanted.image):
        yield f"--image '{wanted.image}' is no name of an image, such as registry.example.org/team/train:1.4"


def _wrong_amounts(wanted: Wanted) -> Iterator[str]:
    bytes_of = (("--memory", wanted.memory), ("--shared-memory", wanted.shared_memory), ("--storage", wanted.storage))
    for option, text in bytes_of:
        if text is not None and (not _QUANTITY.fullmatch(text) or text.endswith("m")):
            yield f"{option} '{text}' is no quantity of bytes, such as 64Gi"
    if wanted.cpu is not None and not _QUANTITY.fullmatch(wanted.cpu):
        yield f"--cpu '{wanted.cpu}' is no quantity of processors, such as 8 or 1500m"
    if wanted.storage_class and not wanted.storage:
        yield "--storage-class is of a claim that --storage makes, and no --storage is given"
    if wanted.grace.seconds < wanted.grace.needed_s:
        needed = f"{wanted.grace.needed_s:.0f}"
        yield f"--grace-seconds {wanted.grace.seconds} is too short: {needed} s are needed ({wanted.grace.because})"


def _wrong_places(wanted: Wanted) -> Iterator[str]:
    mount = wanted.mount
    for option, path in (("--mount", mount), ("the run directory", wanted.program.run)):
        if not path.isprintable():
            yield f"{option} {path!r} holds a line break or control character"
    if not mount.startswith("/") or posixpath.normpath(mount) != mount or mount == "/" or ":" in mount:
        yield f"--mount '{mount}' is no absolute path of a folder, such as /runs"
    run = wanted.program.run
    if not run:
        yield "--run-dir is missing: the run directory, as the script knows it; it must lie on the volume"
    elif not f"{posixpath.normpath(posixpath.join(mount, run))}/".startswith(f"{posixpath.normpath(mount)}/"):
        yield f"the run directory '{run}' does not lie on the volume at {mount}: it would be lost with its pod"
    script = wanted.program.words[0]
    if wanted.program.verb == "run" and script != "-m" and not script.startswith("/"):
        yield f"the script '{script}' is no absolute path in the image, nor -m MODULE: a pod begins in {mount}"
