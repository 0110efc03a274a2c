"""A host's name in records: the machine, and which boot of it."""

from unbroken.store.names import boot_of, host_of, machine_of, same_host


def test_a_host_is_a_machine_and_a_boot_of_it() -> None:
    assert host_of("node7", "1f2e3d4c") == "node7/1f2e3d4c"
    assert (machine_of("node7/1f2e3d4c"), boot_of("node7/1f2e3d4c")) == ("node7", "1f2e3d4c")


def test_a_boot_may_be_unknown() -> None:
    assert host_of("node7", None) == "node7"
    assert (machine_of("node7"), boot_of("node7")) == ("node7", None)


def test_a_machine_is_the_same_after_a_restart_and_no_other() -> None:
    assert same_host("node7/1f2e3d4c", "node7/00000000")
    assert same_host("node7/1f2e3d4c", "node7")
    assert not same_host("node7/1f2e3d4c", "node70/1f2e3d4c")
