"""The options of a manifest, the grace period, and the checks that report all problems at once."""

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

# From the launcher's shutdown timeout to the kubelet's SIGKILL: time to write the outcome.
MARGIN_S: Final = 15
_ROUNDED_TO_S: Final = 10
_LEAST_S: Final = 30


@dataclass(frozen=True)
class Grace:
    """Seconds from SIGTERM to SIGKILL, how many of them a save needs, and how that is known."""

    seconds: int
    needed_s: float
    because: str

    @property
    def shutdown_timeout_s(self) -> int:
        """The shutdown timeout of the launcher, so that it exits before it is killed."""
        return max(self.seconds - MARGIN_S, 1)


def grace_of(events: Iterable[Event], asked_s: int | None = None) -> Grace:
    """The grace period: ``asked_s``, or learned from the saves in the journal, or a default for a run without saves."""
    reserve = learned_reserve(events)
    is_measured = bool(reserve.saves_s)
    needed_s = reserve.seconds() if is_measured else 0.0
    learned_s = max(_LEAST_S, _rounded_up((needed_s if is_measured else UNMEASURED_S) + MARGIN_S))
    if is_measured:
        slowest = amounts.duration(max(reserve.saves_s))
        because = f"the slowest of the last {amounts.plural(len(reserve.saves_s), 'save')} took {slowest}"
    else:
        because = "no save measured yet; generate the manifest again after the first one"
    return Grace(learned_s if asked_s is None else asked_s, needed_s, because)


def _rounded_up(seconds: float) -> int:
    return math.ceil(seconds / _ROUNDED_TO_S) * _ROUNDED_TO_S


# ---- options ----

Kind = Literal["job", "jobset", "pytorchjob"]
KINDS: Final[tuple[Kind, ...]] = ("job", "jobset", "pytorchjob")
# The part of a pod's host name between the name of the workload and the node index.
SUFFIXES: Final[dict[Kind, str]] = {"job": "-", "jobset": "-node-0-", "pytorchjob": "-worker-"}
_LABEL_LENGTH: Final = 63
# RFC 1035, the stricter of the two forms: the Service has the same name.
_LABEL: Final = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
# RFC 1123: names of claims, secrets and storage classes.
_SUBDOMAIN: Final = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_SUBDOMAIN_LENGTH: Final = 253
_IMAGE: Final = re.compile(r"[a-zA-Z0-9][\w.\-/:]*(@sha256:[0-9a-f]{64})?")
_QUANTITY: Final = re.compile(r"(?=.*[1-9])\d+(\.\d+)?(m|k|[KMGTPE]i?|[eE]\d{1,2})?")


@dataclass(frozen=True, kw_only=True)
class Program:
    """What runs in a pod: ``unbroken train`` with a config, or ``unbroken run`` with a script.

    Attributes:
        verb: ``train`` or ``run``.
        words: the config and its overrides, or the script and its arguments.
        run: the run directory, as given to the program.
        config: the text of the config, embedded in the manifest; None for a script, which is in the image.
        config_file: the file name of the config in the pod.
    """

    verb: Literal["train", "run"]
    words: tuple[str, ...]
    run: str
    config: str | None = None
    config_file: str = "config.yaml"


@dataclass(frozen=True, kw_only=True)
class ManifestOptions:
    """All options of a manifest."""

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
        """The PersistentVolumeClaim of the run directory."""
        return self.claim or self.name


def named_after(run: str) -> str:
    """The default name: the last part of the run directory, reduced to the characters of a label."""
    last = posixpath.basename(posixpath.normpath(run)).lower()
    return re.sub(r"[^a-z0-9]+", "-", last).strip("-") or "run"


def require_fit(options: ManifestOptions) -> None:
    """Pass if the API server would accept the manifest and the run directory is on the volume.

    Raises:
        ManifestUnfit: lists all problems.
    """
    found = (*_wrong_names(options), *_wrong_amounts(options), *_wrong_places(options))
    if found:
        raise ManifestUnfit(problems=found)


def _wrong_names(options: ManifestOptions) -> Iterator[str]:
    longest = len(options.name + SUFFIXES[options.kind] + str(max(options.nodes - 1, 0)))
    if not _LABEL.fullmatch(options.name):
        yield f"--name '{options.name}' must be lower-case letters, digits and dashes, starting with a letter"
    elif longest > _LABEL_LENGTH:
        yield f"--name '{options.name}' is too long: pod names would have {longest} characters, {_LABEL_LENGTH} fit"
    if options.namespace is not None and not _LABEL.fullmatch(options.namespace):
        yield f"--namespace '{options.namespace}' must be lower-case letters, digits and dashes, starting with a letter"
    others = (("--claim", options.claim), ("--storage-class", options.storage_class))
    for option, name in (*others, *(("--secret", secret) for secret in options.secrets)):
        if name and not (_SUBDOMAIN.fullmatch(name) and len(name) <= _SUBDOMAIN_LENGTH):
            yield f"{option} '{name}' is not a valid name: lower-case letters, digits, dashes and dots"
    if not options.image:
        yield "missing option --image: the image with unbroken, torch and your code"
    elif not _IMAGE.fullmatch(options.image):
        yield f"--image '{options.image}' is not an image name such as team/train:1.4"


def _wrong_amounts(options: ManifestOptions) -> Iterator[str]:
    bytes_of = (
        ("--memory", options.memory),
        ("--shared-memory", options.shared_memory),
        ("--storage", options.storage),
    )
    for option, text in bytes_of:
        if text is not None and (not _QUANTITY.fullmatch(text) or text.endswith("m")):
            yield f"{option} '{text}' is not a quantity such as 64Gi"
    if options.cpu is not None and not _QUANTITY.fullmatch(options.cpu):
        yield f"--cpu '{options.cpu}' is not a quantity such as 8 or 1500m"
    if options.storage_class and not options.storage:
        yield "--storage-class needs --storage"
    if options.grace.seconds < options.grace.needed_s:
        needed = f"{options.grace.needed_s:.0f}"
        yield f"--grace-seconds {options.grace.seconds} is too short: a save needs {needed} s ({options.grace.because})"


def _wrong_places(options: ManifestOptions) -> Iterator[str]:
    mount = options.mount
    for option, path in (("--mount", mount), ("the run directory", options.program.run)):
        if not path.isprintable():
            yield f"{option} {path!r} contains a line break or control character"
    if not mount.startswith("/") or posixpath.normpath(mount) != mount or mount == "/" or ":" in mount:
        yield f"--mount '{mount}' is not an absolute directory such as /runs"
    run = options.program.run
    if not run:
        yield "missing option --run-dir: the run directory of the script, on the volume"
    elif not f"{posixpath.normpath(posixpath.join(mount, run))}/".startswith(f"{posixpath.normpath(mount)}/"):
        yield f"the run directory '{run}' is not on the volume at {mount}: it would be lost with its pod"
    script = options.program.words[0]
    if options.program.verb == "run" and script != "-m" and not script.startswith("/"):
        yield f"the script '{script}' must be an absolute path in the image, or -m MODULE: a pod starts in {mount}"
