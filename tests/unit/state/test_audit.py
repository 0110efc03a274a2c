"""What the search for unsaved state finds, and that it harms no other thread."""

import sys
from collections.abc import Iterator

import torch

from unbroken.state.audit import _forgotten, audit


def test_state_that_was_not_passed_is_found_by_its_kind_and_name() -> None:
    model = torch.nn.Linear(2, 2)
    forgotten = torch.optim.AdamW(model.parameters())
    passed = torch.optim.SGD(model.parameters())
    found = [str(each) for each in audit({"optimizer": passed}, sys._getframe())]
    assert "optimizer AdamW, called `forgotten`" in found
    assert not [each for each in found if "`passed`" in each]
    del forgotten


def test_a_tuple_that_another_thread_is_building_can_be_finished_during_the_search() -> None:
    optimizer = torch.optim.AdamW(torch.nn.Linear(2, 2).parameters())
    held = []

    def elements() -> Iterator[int]:
        yield 1
        # As another thread would in the middle of it: begins to search, and continues later.
        search = _forgotten(set())
        held.append((search, next(search)))
        yield from range(30)

    assert len(tuple(elements())) == 31
    del optimizer
