"""Each guarantee broken on purpose in a copy of the source: a test must turn red for every one.

A mutation that survives is a hole in the tests, not a detail: it is closed by a stronger test, never by taking the
mutation out of the table.
"""

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mutation.children import HANG_S, REPOSITORY, Server, compiled_copy, linked_copy, replace
from tests.mutation.data_table import DATA
from tests.mutation.frameworks_table import FRAMEWORKS
from tests.mutation.habits_table import HABITS
from tests.mutation.import_table import IMPORTS
from tests.mutation.launch_table import LAUNCH
from tests.mutation.mirror_table import MIRROR
from tests.mutation.proof_table import PROOF
from tests.mutation.table import STORE, Mutation
from tests.mutation.trackers_table import TRACKERS
from tests.mutation.training_table import TRAINING

MUTATIONS = (*STORE, *DATA, *TRAINING, *LAUNCH, *PROOF, *HABITS, *IMPORTS, *MIRROR, *FRAMEWORKS, *TRACKERS)


def _nodes_by_file() -> dict[str, list[str]]:
    found: dict[str, dict[str, None]] = defaultdict(dict)
    for mutation in MUTATIONS:
        for node in mutation.caught_by:
            found[node.partition("::")[0]][node] = None
    return {file: list(nodes) for file, nodes in found.items()}


NODES_BY_FILE = _nodes_by_file()

# Asks this process, a new one, and a child of the fork server where they have the package from.
ASKING = """
import multiprocessing
import subprocess
import sys
from pathlib import Path

import unbroken.store
from unbroken.version import WHERE

FOUND = Path(__file__).with_name("found")


def tell():
    from unbroken.version import WHERE

    FOUND.write_text(WHERE)


def test_ask():
    told = [WHERE, subprocess.check_output(
        [sys.executable, "-c", "from unbroken.version import WHERE; print(WHERE)"], text=True).strip()]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["unbroken.version"])
    child = context.Process(target=tell)
    child.start()
    child.join()
    FOUND.write_text("\\n".join([*told, FOUND.read_text()]))
"""


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled_copy(tmp_path_factory.mktemp("original"))


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server() as started:
        yield started


def test_children_and_their_processes_import_the_copy(original: Path, server: Server, tmp_path: Path) -> None:
    asking = tmp_path / "test_asking.py"
    asking.write_text(ASKING)
    with linked_copy(original) as source:
        replace(source, "version.py", "VERSION", "WHERE = __file__\nVERSION")
        ended = server.run(source, [str(asking)])
        assert ended.exit_code == 0, ended.log
        found = set((tmp_path / "found").read_text().split())
        assert found == {str(source / "unbroken" / "version.py")}
    assert "WHERE" not in (original / "unbroken" / "version.py").read_text()


def test_every_mutation_finds_its_text_once_and_its_tests_exist() -> None:
    wrong = [
        f"{mutation}: {file} has its text {count} times"
        for mutation in MUTATIONS
        for file, old, _ in mutation.replacements
        if (count := (REPOSITORY / "src" / "unbroken" / file).read_text().count(old)) != 1
    ]
    for file, nodes in NODES_BY_FILE.items():
        text = (REPOSITORY / file).read_text()
        names = {node.partition("::")[2].partition("[")[0] for node in nodes} - {""}
        wrong += [f"{file} has no {name}" for name in sorted(names) if f"def {name}(" not in text]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("file", NODES_BY_FILE)
def test_what_catches_mutations_is_green_without_them(file: str, original: Path, server: Server) -> None:
    with linked_copy(original) as source:
        ended = server.run(source, NODES_BY_FILE[file])
    assert ended.exit_code == 0, f"exit {ended.exit_code}:\n{ended.log[-4000:]}"


@pytest.mark.parametrize("mutation", MUTATIONS, ids=str)
def test_a_broken_guarantee_turns_a_test_red(mutation: Mutation, original: Path, server: Server) -> None:
    with linked_copy(original) as source:
        for file, old, new in mutation.replacements:
            replace(source, file, old, new)
        ended = server.run(source, mutation.caught_by, patience_s=HANG_S)
    assert ended.exit_code == 1, f"{mutation} survived (exit {ended.exit_code}):\n{ended.log[-4000:]}"
