"""What records call a host: ``machine/boot``, or the machine alone where its boot is not known.

After a restart no process of before is alive, so the boot tells them apart; a machine's disk outlives it.
"""


def host_of(machine: str, boot: str | None) -> str:
    """A host as records name it."""
    return machine if boot is None else f"{machine}/{boot}"


def machine_of(host: str) -> str:
    """The machine that a host is, whatever boot of it: the name that people know."""
    return host.partition("/")[0]


def boot_of(host: str) -> str | None:
    """Which boot of its machine a host is; None if that is not known."""
    _, known, boot = host.partition("/")
    return boot if known else None


def same_host(one: str, other: str) -> bool:
    """Whether two hosts are one machine, whatever boot of it."""
    return machine_of(one) == machine_of(other)
