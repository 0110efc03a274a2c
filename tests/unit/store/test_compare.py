"""Where two checkpoints differ, from their manifests alone."""

from unbroken.store.compare import compare
from unbroken.store.digest import digest_of
from unbroken.store.manifest import Manifest, Part, Tensor


def manifest(
    parts: dict[str, bytes], *, kind: str = "periodic", tensors: dict[str, Tensor] | None = None, step: int = 1
) -> Manifest:
    found = tuple(Part(name, digest_of([data], 1024)) for name, data in parts.items())
    return Manifest(f"i{step}", step, kind, step, f"j{step}", "unbroken", found, tensors or {}, block_bytes=1024)


def test_step_clock_and_job_do_not_count() -> None:
    found = compare(manifest({"a": b"1"}, step=1), manifest({"a": b"1"}, step=2))
    assert found.is_same and (found.unit, found.same) == ("part", 1)


def test_parts_differ_by_size_or_by_blocks_or_by_being_there() -> None:
    first = manifest({"a": b"1", "b": b"x" * 3000, "c": b"1", "same": b"s"})
    second = manifest({"a": b"12", "b": b"x" * 2999 + b"y", "d": b"1", "same": b"s"})
    found = compare(first, second)
    assert found.differ == (("a", "1 and 2 bytes"), ("b", "1 of 3 blocks differ"))
    assert (found.only_first, found.only_second, found.same) == (("c",), ("d",), 1)


def test_tensors_are_compared_where_both_name_them() -> None:
    first = {"w": Tensor("f32", (2, 3), "a"), "b": Tensor("f32", (2,), "b"), "s": Tensor("f32", (), "c")}
    second = {"w": Tensor("f32", (3, 2), "a"), "b": Tensor("f16", (2,), "b"), "s": Tensor("f32", (), "d")}
    # Another number of ranks writes other parts for the same tensors.
    found = compare(manifest({"a": b"1"}, tensors=first), manifest({"b": b"2"}, tensors=second))
    assert found.unit == "tensor"
    assert found.differ == (("b", "type f32 and f16"), ("s", "other bytes"), ("w", "shape 2x3 and 3x2"))
    assert compare(manifest({"a": b"1"}, tensors=first), manifest({"b": b"2"}, tensors=first)).is_same


def test_parts_are_compared_where_only_one_names_tensors() -> None:
    tensors = {"w": Tensor("f32", (), "a")}
    assert compare(manifest({"a": b"1"}, tensors=tensors), manifest({"a": b"1"})).unit == "part"


def test_the_other_files_of_a_sealed_folder_count_too() -> None:
    tensors = {"w": Tensor("f32", (), "a")}
    first = manifest({"m.safetensors": b"1", "optimizer.pt": b"1"}, kind="sealed", tensors=tensors)
    second = manifest({"m.safetensors": b"2", "optimizer.pt": b"2"}, kind="sealed", tensors=tensors)
    found = compare(first, second)
    assert (found.unit, found.same, found.differ) == ("item", 1, (("optimizer.pt", "1 of 1 blocks differ"),))
