"""What a device has no room for is said, on a CPU too, whose allocator has no error of its own."""

import pytest
import torch

from unbroken.errors import DeviceFull
from unbroken.gpt.device import noticing_full

CPU = torch.device("cpu")


def test_memory_that_cannot_be_had_is_named_with_what_it_was_for() -> None:
    expected = pytest.raises(DeviceFull, check=lambda each: (each.device, each.is_training) == ("cpu", True))
    with expected as full, noticing_full(CPU, "this training", is_training=True):
        torch.empty(1 << 55)
    assert "unbroken validate" in full.value.help()[0].command


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("cuda"), MemoryError()])
def test_every_way_to_say_it_is_known(error: Exception) -> None:
    with pytest.raises(DeviceFull, check=lambda each: each.doing == "the text"), noticing_full(CPU, "the text"):
        raise error


def test_other_errors_pass_as_they_are() -> None:
    with pytest.raises(RuntimeError, match="shapes"), noticing_full(CPU, "the text"):
        raise RuntimeError("shapes do not fit")
