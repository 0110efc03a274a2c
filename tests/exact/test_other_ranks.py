"""What each kind of loader does on another number of ranks: measured, and kept as a table of docs/loaders.md.

``UNBROKEN_WRITE_DOCS=1`` writes the table anew.
"""

from pathlib import Path

import pytest

pytest.importorskip("datasets")

from tests.exact.other_ranks import CASES, resume_all, train_all
from tests.exact.test_loaders import require_table
from tests.unit.data.streams import TWO_BUCKETS, make_corpus
from unbroken.testing.worlds import logs, preload, spawn

preload("tests.exact.other_ranks")
HEAD = """\
| loader | on another number of ranks |
|---|---|
"""
# By whether it is refused, and whether each sample then comes once.
WAYS = {
    (False, True): "resumes: each sample once",
    (True, True): "refused; accepted, each sample once: each step has the same samples, split otherwise",
    (True, False): "refused; accepted, samples are repeated and left out",
}


@pytest.mark.promise("C13", "U10")
def test_what_a_loader_does_on_another_number_of_ranks_is_measured_and_reported_at_the_start(tmp_path: Path) -> None:
    make_corpus(tmp_path / "corpus", TWO_BUCKETS)
    before = spawn(2, train_all, str(tmp_path))
    after = spawn(1, resume_all, str(tmp_path))
    assert all(each.is_good for each in (*before, *after)), logs([*before, *after])
    rows = []
    for number, name in enumerate(CASES):
        (first, said), (other, _) = (each.value[number] for each in before)
        is_refused, rest = after[0].value[number]
        # Ranks that are served the same have served it once.
        served = first if first == other else first + other
        is_once = len({*served, *rest}) == len(served) + len(rest) and len(rest) > 0
        assert is_once or is_refused, name
        # Which RNG states a replayed epoch began with is known only when it is saved.
        is_said = any("resumes on 2 ranks only" in line for line in said)
        assert is_said == (is_refused and "manual_seed" not in name), (name, said)
        rows.append(f"| {name} | {WAYS[is_refused, is_once]} |\n")
    require_table("<!-- ranks: begin -->\n", HEAD + "".join(rows), "<!-- ranks: end -->\n")
