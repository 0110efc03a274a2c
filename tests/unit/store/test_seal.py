"""Sealing a folder that another tool wrote."""

import json
from pathlib import Path

import pytest

from tests.unit.store.saving import nobody, save, store_with, tree
from unbroken.errors import CannotSeal, ManifestDamaged, SealedDiffers, StorageFailed, UnsafeName
from unbroken.files import LOCAL
from unbroken.store.check import Level, verify
from unbroken.store.choose import resume_point
from unbroken.store.commit import begin
from unbroken.store.compare import compare
from unbroken.store.directory import Store
from unbroken.store.keep import LastK, decide
from unbroken.store.names import scratch
from unbroken.store.rewind import rewind
from unbroken.store.scan import newest_first, scan
from unbroken.store.seal import folders_to_seal, infer_origin, infer_step, seal, seal_command
from unbroken.store.sweep import candidates, sweep


def folder(root: Path, name: str, **files: bytes) -> Path:
    path = root / name
    for file, data in (files or {"weights.pt": b"weights"}).items():
        (path / file).parent.mkdir(parents=True, exist_ok=True)
        (path / file).write_bytes(data)
    return path


def safetensors(tensors: dict[str, bytes], **changes: object) -> bytes:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, data in tensors.items():
        header[name] = {"dtype": "U8", "shape": [len(data)], "data_offsets": [at, at + len(data)], **changes}
        at += len(data)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + b"".join(tensors.values())


def test_sealing_adds_the_manifest_and_changes_nothing_else(tmp_path: Path) -> None:
    path = folder(tmp_path, "step_5", **{"a.pt": b"1", "deep/b.bin": b"22"})
    before = tree(path)
    sealed = seal(Store(tmp_path), "step_5", at_ns=9, metrics={"loss": 0.5})
    assert sealed.is_new and sealed.manifest.step == 5 and sealed.manifest.metrics == {"loss": 0.5}
    assert [part.name for part in sealed.manifest.parts] == ["a.pt", "deep/b.bin"]
    after = tree(path)
    assert after.pop("manifest.json") and after == before
    assert verify(Store(tmp_path), "step_5", Level.FULL).is_sound


@pytest.mark.promise("X6")
def test_a_sealed_folder_is_chosen_kept_and_swept_like_ours(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for step in (5, 6, 7):
        folder(tmp_path, f"global_step{step}")
        seal(store, f"global_step{step}", at_ns=step)
    assert newest_first(store, scan(store).committed)[0] == "global_step7"
    (tmp_path / "global_step7" / "weights.pt").write_bytes(b"WEIGHTS")
    choice = resume_point(store, Level.FULL, job="j", at_ns=1)
    assert choice.chosen is not None and choice.chosen.name == "global_step6"
    assert (tmp_path / "quarantine" / "global_step7" / "weights.pt").read_bytes() == b"WEIGHTS"
    released = decide(candidates(store, scan(store).committed), [LastK(1)]).released
    assert sweep(store, released, is_live=nobody).names == ("global_step5",)


def test_sealing_twice_verifies_and_writes_nothing(tmp_path: Path) -> None:
    folder(tmp_path, "step_5")
    first = seal(Store(tmp_path), "step_5", at_ns=1)
    before = (tmp_path / "step_5" / "manifest.json").stat()
    second = seal(Store(tmp_path), "step_5", at_ns=2)
    assert not second.is_new and second.manifest == first.manifest
    after = (tmp_path / "step_5" / "manifest.json").stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_a_seal_is_not_rewritten_by_another_word_about_it(tmp_path: Path) -> None:
    folder(tmp_path, "step_5")
    seal(Store(tmp_path), "step_5", at_ns=1, metrics={"loss": float("nan")})
    assert not seal(Store(tmp_path), "step_5", at_ns=1, step=5, metrics={"loss": float("nan")}).is_new
    with pytest.raises(CannotSeal, match="sealed already, as step 5"):
        seal(Store(tmp_path), "step_5", at_ns=1, step=6)
    with pytest.raises(CannotSeal, match="other metrics"):
        seal(Store(tmp_path), "step_5", at_ns=1, metrics={"loss": 1.0})


@pytest.mark.parametrize("change", ["changed", "removed", "added"])
def test_a_folder_that_changed_since_it_was_sealed_is_reported(tmp_path: Path, change: str) -> None:
    path = folder(tmp_path, "step_5")
    seal(Store(tmp_path), "step_5", at_ns=1)
    if change == "changed":
        (path / "weights.pt").write_bytes(b"WEIGHTS")
    elif change == "removed":
        (path / "weights.pt").unlink()
    else:
        (path / "more.pt").write_bytes(b"")
    with pytest.raises(SealedDiffers) as differs:
        seal(Store(tmp_path), "step_5", at_ns=2)
    assert ("more.pt" if change == "added" else "weights.pt") in differs.value.findings[0]


@pytest.mark.parametrize("change", ["rewritten", "grown", "removed"])
def test_a_folder_that_is_still_being_written_is_not_sealed(tmp_path: Path, change: str) -> None:
    path = folder(tmp_path, "step_5", **{"a.pt": b"1" * 100, "b.pt": b"2" * 100})

    def meanwhile(amount: int) -> None:
        if change == "removed":
            (path / "a.pt").unlink(missing_ok=True)
        else:
            (path / "a.pt").write_bytes(b"3" * (100 if change == "rewritten" else 200))

    with pytest.raises((CannotSeal, StorageFailed)):
        seal(Store(tmp_path), "step_5", at_ns=1, workers=1, progress=meanwhile)
    assert not (path / "manifest.json").exists()


def test_what_a_crash_left_of_an_earlier_attempt_is_not_sealed_in(tmp_path: Path) -> None:
    path = folder(tmp_path, "step_5")
    (path / scratch("seal", "manifest.json")).write_bytes(b"half")
    (path / ".scratch-seal-mine").write_bytes(b"mine")
    sealed = seal(Store(tmp_path), "step_5", at_ns=1)
    assert [part.name for part in sealed.manifest.parts] == [".scratch-seal-mine", "weights.pt"]
    assert not (path / scratch("seal", "manifest.json")).exists()


@pytest.mark.parametrize("name", ["quarantine", "latest", ".pins", ".rewinds", "abandoned", ".tmp-j-5-1", ".trash-x"])
def test_a_name_that_the_store_keeps_for_itself_is_refused(tmp_path: Path, name: str) -> None:
    path = folder(tmp_path, name)
    with pytest.raises(CannotSeal, match="keeps for itself"):
        seal(Store(tmp_path), name, at_ns=1, step=5)
    assert tree(path) == {"weights.pt": b"weights"}


def test_a_torn_draft_cannot_be_made_a_checkpoint_by_sealing_it(tmp_path: Path) -> None:
    draft = begin(Store(tmp_path), step=5, job="j1")
    draft.write_part("a", [b"1"])
    with pytest.raises(CannotSeal):
        seal(Store(tmp_path), draft.path.name, at_ns=1)


def test_a_store_is_not_sealed_as_one_checkpoint(tmp_path: Path) -> None:
    store = store_with(tmp_path / "run-step-5", 1, 2)
    before = tree(store.root)
    with pytest.raises(CannotSeal, match="checkpoints of its own"):
        seal(Store(tmp_path), "run-step-5", at_ns=1)
    assert tree(store.root) == before


@pytest.mark.parametrize("inside", ["checkpoints/", ""])
def test_a_run_is_not_sealed_as_one_checkpoint(tmp_path: Path, inside: str) -> None:
    run = folder(tmp_path, "run1", **{f"{inside}checkpoint-{step}/weights.pt": b"w" for step in (5, 6)})
    before = tree(run)
    with pytest.raises(CannotSeal, match="holds checkpoints") as refused:
        seal(Store(tmp_path), "run1", at_ns=1, step=7)
    assert tree(run) == before and list(folders_to_seal(Store(tmp_path))) == []
    store = Store(run / inside)
    assert refused.value.help()[0].command == f"unbroken seal {store.root} --all"
    assert list(folders_to_seal(store)) == ["checkpoint-5", "checkpoint-6"]
    # One folder inside is a layout of DeepSpeed, and one checkpoint.
    folder(tmp_path, "best", **{"latest": b"global_step9", "global_step9/weights.pt": b"w"})
    assert seal(Store(tmp_path), "best", at_ns=1).manifest.step == 9


def test_the_command_that_seals_a_folder_fits_what_is_in_it(tmp_path: Path) -> None:
    folder(tmp_path, "checkpoint-5/global_step5")
    folder(tmp_path, "out/checkpoint-5")
    folder(tmp_path, "best")
    folder(tmp_path, "lightning", **{"epoch=1-step=5.ckpt": b"w"})
    folder(tmp_path, "runs/run1/checkpoints/checkpoint-5")
    (tmp_path / "empty").mkdir()
    said = {path.name: seal_command(LOCAL, path) for path in tmp_path.iterdir()}
    said |= {"run1": seal_command(LOCAL, tmp_path / "runs" / "run1")}
    assert said == {
        "checkpoint-5": f"unbroken seal {tmp_path}/checkpoint-5",
        "out": f"unbroken seal {tmp_path}/out --all",
        "best": f"unbroken seal {tmp_path}/best --step 1000",
        "lightning": f"unbroken seal {tmp_path}/lightning",
        "runs": None,
        "run1": f"unbroken seal {tmp_path}/runs/run1/checkpoints --all",
        "empty": None,
    }


def test_links_and_empty_folders_and_odd_names_are_refused(tmp_path: Path) -> None:
    (folder(tmp_path, "step_1") / "link").symlink_to("weights.pt")
    (tmp_path / "step_2").mkdir()
    folder(tmp_path, "step_3", **{"a\nb": b""})
    with pytest.raises(CannotSeal, match="link is not a regular file"):
        seal(Store(tmp_path), "step_1", at_ns=1)
    with pytest.raises(CannotSeal, match="holds no files"):
        seal(Store(tmp_path), "step_2", at_ns=1)
    with pytest.raises(UnsafeName):
        seal(Store(tmp_path), "step_3", at_ns=1)
    assert list(tmp_path.rglob("manifest.json")) == []


def test_another_tools_manifest_is_never_replaced(tmp_path: Path) -> None:
    folder(tmp_path, "step_1", **{"manifest.json": b'{"theirs": 1}', "w.pt": b"1"})
    with pytest.raises(CannotSeal, match="another tool wrote"):
        seal(Store(tmp_path), "step_1", at_ns=1)
    assert (tmp_path / "step_1" / "manifest.json").read_bytes() == b'{"theirs": 1}'


def test_a_folder_without_a_step_must_be_given_one(tmp_path: Path) -> None:
    folder(tmp_path, "best")
    with pytest.raises(CannotSeal, match="state the step") as refused:
        seal(Store(tmp_path), "best", at_ns=1)
    assert refused.value.help()[0].command == f"unbroken seal {tmp_path / 'best'} --step 1000"
    assert seal(Store(tmp_path), "best", at_ns=1, step=3).manifest.step == 3


@pytest.mark.parametrize("step", [-1, 1 << 63])
def test_a_step_that_no_reader_takes_is_not_sealed(tmp_path: Path, step: int) -> None:
    path = folder(tmp_path, "best")
    with pytest.raises(ManifestDamaged):
        seal(Store(tmp_path), "best", at_ns=1, step=step)
    assert not (path / "manifest.json").exists()


def test_the_step_is_taken_from_json_then_name_then_files(tmp_path: Path) -> None:
    state = json.dumps({"global_step": 7, "step": 9}).encode()
    assert infer_step(LOCAL, folder(tmp_path, "checkpoint-5", **{"trainer_state.json": state})) == 7
    for i, bad in enumerate([b"[]", b"{", b'{"global_step": -1}', b'{"global_step": true}', b'{"global_step": "7"}']):
        assert infer_step(LOCAL, folder(tmp_path, f"x{i}/checkpoint-5", **{"trainer_state.json": bad})) == 5
    assert infer_step(LOCAL, folder(tmp_path, "last", **{"epoch=0-step=8.ckpt": b"", "hparams.yaml": b""})) == 8
    assert infer_step(LOCAL, folder(tmp_path, "two", **{"step=8.ckpt": b"", "step=9.ckpt": b""})) is None
    assert infer_step(LOCAL, folder(tmp_path, "none")) is None


@pytest.mark.parametrize(
    ("names", "origin"),
    [
        (["mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"], "deepspeed"),
        (["model.safetensors", "optimizer.pt", "trainer_state.json"], "transformers"),
        (["model.safetensors", "optimizer.bin", "random_states_0.pkl"], "accelerate"),
        (["epoch=0-step=5.ckpt"], "lightning"),
        ([".metadata", "__0_0.distcp"], "torch-dcp"),
        (["model.pt"], "torch"),
        (["model.safetensors"], "safetensors"),
        (["notes.txt"], "unknown"),
    ],
)
def test_the_tool_is_recognized_by_the_names_it_uses(names: list[str], origin: str) -> None:
    assert infer_origin(names) == origin


def test_folders_that_tell_a_step_and_are_not_sealed_are_found(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for name in ("step_1", "step_2", "notes", ".tmp-j-3-1", "quarantine"):
        folder(tmp_path, name)
    (tmp_path / "step_9.txt").write_text("")
    seal(store, "step_1", at_ns=1)
    assert list(folders_to_seal(store)) == ["step_2"]


def test_the_tensors_of_safetensors_files_are_named_and_compared(tmp_path: Path) -> None:
    store = Store(tmp_path)
    folder(tmp_path, "step_1", **{"model.safetensors": safetensors({"a": b"11", "b": b"22"}), "opt.pt": b"1"})
    folder(tmp_path, "step_2", **{"model.safetensors": safetensors({"a": b"11", "b": b"33"}), "opt.pt": b"1"})
    first, second = (seal(store, f"step_{i}", at_ns=i).manifest for i in (1, 2))
    assert {name: tensor.shape for name, tensor in first.tensors.items()} == {"a": (2,), "b": (2,)}
    assert compare(first, second).differ == (("b", "other bytes"),)


def test_two_files_with_a_tensor_of_one_name_hide_nothing(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for i, data in ((1, b"x"), (2, b"y")):
        files = {"a.safetensors": safetensors({"w": data}), "b.safetensors": safetensors({"w": b"same"})}
        folder(tmp_path, f"step_{i}", **files)
    first, second = (seal(store, f"step_{i}", at_ns=i).manifest for i in (1, 2))
    assert sorted(first.tensors) == ["b.safetensors:w", "w"]
    assert not compare(first, second).is_same


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff" * 8,
        (5).to_bytes(8, "little") + b"{{{{{",
        (2).to_bytes(8, "little") + b"[]",
        safetensors({"a": b"1"}, shape=[True]),
        safetensors({"a": b"1"}, shape="1"),
        safetensors({"a": b"1"}, data_offsets=[5, 2]),
        safetensors({"a": b"1"}, data_offsets=[-9, 2]),
        safetensors({"\ud800": b"1"}),
    ],
    ids=["empty", "huge", "no-json", "list", "bool", "text", "backwards", "negative", "surrogate"],
)
def test_a_file_that_is_no_safetensors_is_sealed_as_bytes(tmp_path: Path, data: bytes) -> None:
    folder(tmp_path, "step_1", **{"model.safetensors": data})
    assert seal(Store(tmp_path), "step_1", at_ns=1).manifest.tensors == {}
    assert verify(Store(tmp_path), "step_1", Level.FULL).is_sound


def test_a_safetensors_file_that_was_cut_off_is_not_sealed(tmp_path: Path) -> None:
    folder(tmp_path, "step_1", **{"model.safetensors": safetensors({"a": b"1234"})[:-1]})
    with pytest.raises(CannotSeal, match="ends before its tensors do"):
        seal(Store(tmp_path), "step_1", at_ns=1)


@pytest.mark.promise("K5")
def test_the_same_bytes_made_again_after_a_rewind_are_not_taken_for_the_abandoned_ones(tmp_path: Path) -> None:
    store = Store(tmp_path)
    save(store, 1)
    folder(tmp_path, "step_2")
    seal(store, "step_2", at_ns=10)
    rewind(store, newest_first(store, scan(store).committed), target="checkpoint-1", job="j", at_ns=11)
    assert scan(store).committed == ("checkpoint-1",)
    folder(tmp_path, "step_2")
    seal(store, "step_2", at_ns=12)
    assert scan(store).committed == ("checkpoint-1", "step_2")
