"""What all tests share: what a test needs from the machine, and the tool as a subprocess."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Generator, Mapping
from functools import cache
from pathlib import Path

import hypothesis
import pytest

import tests.patience  # noqa: F401 - sets the time limit of all worlds before one is imported
from tests import tiers
from tests.forked_tool import run_tool
from tests.spent import Account, Meter

SBIN = "/usr/sbin:/sbin"
# A test of hypothesis takes this part of its examples in the quick tier, and no fewer than so many.
_QUICK_PART, _FEWEST = 5, 10
_HYPOTHESIS_SETTINGS = "_hypothesis_internal_use_settings"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let a run be told which tier to take."""
    text = "run the tests of one tier and print what they cost in CPU seconds; tests/tiers.toml says which they are"
    parser.addoption("--tier", choices=tiers.TIERS, help=text)


def pytest_configure(config: pytest.Config) -> None:
    """Begin every process of a run alike: with signals at their defaults, measured if a tier was asked for."""
    is_worker = hasattr(config, "workerinput")
    has_workers = not is_worker and bool(config.getoption("numprocesses", None))
    if not has_workers:
        _restore_signals()
    # Every test with a cache of its own would test the machine again; those of the self-test turn it on.
    os.environ.setdefault("UNBROKEN_SELF_TEST", "off")
    _take_time("UNBROKEN_MUTATED" in os.environ)
    tier = config.getoption("tier")
    if tier and not has_workers:
        config.pluginmanager.register(Meter())
    if tier and not is_worker:
        config.pluginmanager.register(Account(tiers.read_tiers(), tier))


def _take_time(is_mutated: bool) -> None:
    """Let hypothesis be as slow as a busy machine is; in a test of a mutation nobody reads the smallest example."""
    phases = [phase for phase in hypothesis.Phase if phase not in (hypothesis.Phase.shrink, hypothesis.Phase.explain)]
    unhurried = hypothesis.settings(deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
    hypothesis.settings.register_profile("unhurried", unhurried)
    hypothesis.settings.register_profile("mutated", unhurried, phases=phases)
    hypothesis.settings.load_profile("mutated" if is_mutated else "unhurried")


def _restore_signals() -> None:
    """Handle signals as a terminal's programs do, however the tests were started; all that they start inherits it.

    Under `nohup make test &` SIGINT, SIGQUIT and SIGHUP come ignored. What is ignored stays so across an exec: no
    process that a test starts could be interrupted.
    """
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        # Out of the terminal's session, or the hangup that nohup is there for would end this process. One that leads
        # its group cannot leave, and is not protected.
        with contextlib.suppress(PermissionError):
            os.setsid()
    for number in (signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Take out what is not of the tier."""
    tier = config.getoption("tier")
    if not tier:
        return
    is_quick = tiers.quick(tiers.read_tiers(), [_file_and_test(item) for item in items])
    taken: list[pytest.Item] = []
    left: list[pytest.Item] = []
    for item, its_quick in zip(items, is_quick, strict=True):
        is_hypothesis = item.get_closest_marker("hypothesis") is not None
        if its_quick and is_hypothesis and tier == "quick":
            take_fewer_examples(item)
        (taken if its_quick == (tier == "quick") or (is_hypothesis and its_quick) else left).append(item)
    items[:] = taken
    config.hook.pytest_deselected(items=left)


def _file_and_test(item: pytest.Item) -> tuple[str, str]:
    file, _, test = item.nodeid.partition("::")
    return file.removeprefix("tests/"), test.partition("[")[0]


def take_fewer_examples(item: pytest.Item) -> None:
    """Give a test of hypothesis a part of its examples."""
    function = getattr(item, "obj", None)
    full = getattr(function, _HYPOTHESIS_SETTINGS, None) or hypothesis.settings()
    fewer = max(_FEWEST, full.max_examples // _QUICK_PART)
    if fewer < full.max_examples:
        setattr(function, _HYPOTHESIS_SETTINGS, hypothesis.settings(full, max_examples=fewer))


def _has_command(name: str) -> Callable[[], bool]:
    return lambda: shutil.which(name, path=f"{os.environ.get('PATH', '')}:{SBIN}") is not None


def _may_trace() -> bool:
    # Installed is not enough: a container may forbid one process to trace another.
    return _has_command("strace")() and _succeeds("strace", "-o", os.devnull, "true")


def _has_free_loop_device() -> bool:
    return os.geteuid() == 0 and _has_command("losetup")() and _succeeds("losetup", "--find")


def _has_exfat() -> bool:
    return Path("/dev/fuse").exists() and all(_has_command(name)() for name in ("mkfs.exfat", "mount.exfat-fuse"))


def _has_slurm() -> bool:
    return all(_has_command(name)() for name in ("slurmctld", "slurmd", "sbatch", "munged"))


def _has_ceph() -> bool:
    return all(_has_command(name)() for name in ("ceph-mon", "ceph-osd", "ceph", "radosgw", "radosgw-admin"))


def _has_moto() -> bool:
    return (Path(__file__).resolve().parents[1] / ".moto" / "bin" / "moto_server").exists()


def _has_azurite() -> bool:
    installed = Path(__file__).resolve().parents[1] / ".azurite" / "node_modules" / ".bin" / "azurite-blob"
    return _has_command("node")() and installed.exists()


def _succeeds(*command: str) -> bool:
    return subprocess.run(command, capture_output=True, check=False, env=_with_sbin()).returncode == 0


def _with_sbin() -> dict[str, str]:
    return {**os.environ, "PATH": f"{os.environ.get('PATH', '')}:{SBIN}"}


# What a test can ask for: how it is found out, and what is said where it is missing.
NEEDS: Mapping[str, tuple[Callable[[], bool], str]] = {
    "strace": (_may_trace, "needs the Debian package strace, and the right to trace a process"),
    "xfsprogs": (_has_command("mkfs.xfs"), "needs the Debian package xfsprogs"),
    "exfat": (_has_exfat, "needs /dev/fuse and the Debian packages exfat-fuse and exfatprogs"),
    "e2fsprogs": (_has_command("mkfs.ext4"), "needs the Debian package e2fsprogs"),
    "root": (lambda: os.geteuid() == 0, "needs to be root"),
    "slurm": (_has_slurm, "needs the Debian packages slurmctld, slurmd, slurm-client and munge"),
    "faketime": (_has_command("faketime"), "needs the Debian package faketime"),
    "ceph": (_has_ceph, "needs the Debian packages ceph-mon, ceph-osd, ceph-common and radosgw"),
    "moto": (_has_moto, "needs the S3 server moto in .moto: tools/moto.sh .moto"),
    "azurite": (_has_azurite, "needs node and the Azure server azurite in .azurite: tools/azurite.sh .azurite"),
    "loop": (_has_free_loop_device, "needs root, a free loop device and the Debian package mount"),
}

# From npm, which a CI machine need not have.
NOT_ON_CI = frozenset({"azurite"})
# Of a build of torch for GPUs.
NOT_INSTALLED_ON_CI = frozenset({"triton"})


@cache
def lacking(need: str) -> str | None:
    """Why a need is not met here; None if it is.

    Raises:
        KeyError: no such need is known.
    """
    is_met, reason = NEEDS[need]
    return None if is_met() else reason


def _is_ci() -> bool:
    return os.environ.get("CI", "").lower() in ("true", "1")


def _fail_if_not_installed(report: pytest.CollectReport | pytest.TestReport) -> None:
    """Make a failure of a skip by ``importorskip``, on CI: an extra that drops out would end its tests unnoticed."""
    found = re.search(r"could not import '([^']+)'", str(report.longrepr)) if report.skipped and _is_ci() else None
    if found and found[1] not in NOT_INSTALLED_ON_CI:
        report.outcome = "failed"
        report.longrepr = f"{found[0]}; CI must have it"


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Fail a file whose package is not installed, on CI."""
    report = yield
    _fail_if_not_installed(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Fail a test whose package is not installed, on CI."""
    report = yield
    _fail_if_not_installed(report)
    return report


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test whose needs are not met; on CI, where all are to be met, fail it."""
    for marker in item.iter_markers("needs"):
        for need in marker.args:
            if need not in NEEDS:
                pytest.fail(f"no such need: {need!r}; known are {', '.join(NEEDS)}", pytrace=False)
            reason = lacking(need)
            if reason and need not in NOT_ON_CI and _is_ci():
                pytest.fail(f"{reason}; CI must have it", pytrace=False)
            if reason:
                pytest.skip(reason)


def without_pytest() -> dict[str, str]:
    """The environment for a pytest of its own: what a worker of this run was told is not for that one."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}


Tool = Callable[..., "subprocess.CompletedProcess[str]"]


def _clean_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "UNBROKEN_TRACEBACK")}


@pytest.fixture
def unbroken(tmp_path: Path) -> Tool:
    """The tool as a process of its own, started in ``tmp_path``; give it the arguments, get what it said."""

    def call(*arguments: str | Path, env: Mapping[str, str] | None = None) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [sys.executable, "-m", "unbroken", *map(str, arguments)],
            capture_output=True,
            text=True,
            check=False,
            cwd=tmp_path,
            env={**_clean_environment(), **(env or {})},
        )

    return call


@pytest.fixture
def forked_unbroken(tmp_path: Path) -> Tool:
    """As ``unbroken``, in a process that has torch already: a tenth of the CPU time where a command needs torch."""

    def call(*arguments: str | Path, env: Mapping[str, str] | None = None) -> "subprocess.CompletedProcess[str]":
        return run_tool([str(each) for each in arguments], tmp_path, {**_clean_environment(), **(env or {})})

    return call
