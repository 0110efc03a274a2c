"""The tables of ``bench.gpu`` and ``bench.compare``, from results that are kept and from small ones."""

import xml.etree.ElementTree as ElementTree

from bench.compare import COLUMNS, DURABLE, LIMIT, LOAD, WAITS, Found, SideFailed, panels, rows_of
from bench.gpu import COMMANDS, ROWS, kept, whole_table
from bench.plot import bars_svg


def test_the_gpu_table_is_made_of_the_results_that_are_kept() -> None:
    shown = whole_table("cuda", list(COMMANDS))
    for name in COMMANDS:
        facts = kept(name, "cuda")
        assert facts is not None
        assert shown.count(f"\n{name} ") == len(list(ROWS[name](facts))) > 0


def test_ratios_are_to_the_limit_and_a_pause_has_no_rate() -> None:
    found = Found()
    found.seconds = {
        WAITS: {"unbroken": [0.1, 0.3, 0.2], "torch.save": [4.0]},
        DURABLE: {LIMIT: [1.0], "unbroken": [1.25]},
        LOAD: {LIMIT: [0.5], "torch.save": [1.0]},
    }
    found.cpu_s[DURABLE] = {"unbroken": [0.5, 0.3, 0.4]}
    rows = rows_of(found, 1_000_000_000)
    assert all(len(row) == len(COLUMNS) for row in rows)
    assert rows[0] == (WAITS, "unbroken", "0.200", "0.1 to 0.3", "", "1.00", "", "")
    assert rows[1][5] == "20.00"
    assert (DURABLE, "unbroken", "1.250", "1.25 to 1.25", "0.80", "1.25", "0.40", "0.3 to 0.5") in rows
    assert rows[-1][5] == "2.00"


def test_a_side_that_fails_has_no_figures_and_is_named() -> None:
    found = Found()
    found.note(WAITS, "lightning", 1.0)
    found.note(WAITS, "unbroken", 1.0)
    found.note(LOAD, "lightning", 1.0, 2.0)
    found.leave_out("lightning", SideFailed("Traceback\n  line\nModuleNotFoundError: No module named 'lightning'\n"))
    assert found.seconds[WAITS] == {"unbroken": [1.0]}
    assert found.seconds[LOAD] == found.cpu_s[LOAD] == {}
    assert found.failed == {"lightning": "ModuleNotFoundError: No module named 'lightning'"}


def test_the_bars_are_as_long_as_their_medians_and_the_shortest_is_first() -> None:
    found = Found()
    found.seconds = {WAITS: {"torch.save": [2.0, 8.0, 4.0], "unbroken": [1.0]}, DURABLE: {LIMIT: [0.5]}, LOAD: {}}
    found.cpu_s[LOAD] = {"a <b> & c": [0.0]}
    drawn = ElementTree.fromstring(bars_svg(panels(found)))
    bars = [each for each in drawn.iter() if each.tag.endswith("rect")][1:]
    names = [each.text for each in drawn.iter() if each.get("text-anchor") == "end"]
    assert names == ["unbroken", "torch.save", LIMIT, "a <b> & c"]
    widths = [float(each.get("width", "")) for each in bars]
    assert round(widths[1] / widths[0], 2) == 4.0 and widths[3] == 0.0
