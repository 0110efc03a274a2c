"""An export under every crash and every power cut: there whole, or not there; and the next one is not in its way."""

from pathlib import Path

import torch

from unbroken.config.sections import ModelConfig
from unbroken.disk import Disk
from unbroken.files import Files
from unbroken.gpt.export import to_safetensors
from unbroken.gpt.huggingface import to_huggingface
from unbroken.gpt.model import GPT
from unbroken.testing import ERRORS, KILLS, MemoryDisk, crash_points, crash_states

CONFIG = ModelConfig(vocab_size=4, n_embd=4, n_layer=1, n_head=1, n_positions=4, intermediate_size=2)
FOLDER, FILE = Path("/out/llama"), Path("/out/model.safetensors")
STATE = {name: torch.zeros_like(tensor) for name, tensor in GPT(CONFIG).state_dict().items()}
NEW = {name: torch.ones_like(tensor) for name, tensor in STATE.items()}
NAMES = ["config.json", "generation_config.json", "model.safetensors"]
LIMIT_BYTES = 1 << 20


def a_place() -> MemoryDisk:
    """Where an earlier export was killed halfway."""
    disk = MemoryDisk(["/out", "/out/.llama.partial"])
    Files(disk).write_new(Path("/out/.llama.partial/model.safetensors"), [b"half"])
    return disk


def exports(disk: Disk) -> None:
    files = Files(disk)
    to_safetensors(STATE, FILE, files=files)
    to_huggingface(STATE, CONFIG, FOLDER, files=files)


def with_exports() -> MemoryDisk:
    """Where exports stand, and one before them was replaced by a job that was killed."""
    disk = MemoryDisk(["/out", "/out/.llama.replaced"])
    Files(disk).write_new(Path("/out/.llama.replaced/config.json"), [b"older"])
    exports(disk)
    return disk


def replaces(disk: Disk) -> None:
    files = Files(disk)
    to_safetensors(NEW, FILE, is_replacing=True, files=files)
    to_huggingface(NEW, CONFIG, FOLDER, is_replacing=True, files=files)


def contents(files: Files) -> dict[str, bytes]:
    found = {}
    if files.find(FILE) is not None:
        found["file"] = files.read_bytes(FILE, limit_bytes=LIMIT_BYTES)
    for node in files.list_directory(FOLDER) if files.find(FOLDER) is not None else ():
        found[node.name] = files.read_bytes(FOLDER / node.name, limit_bytes=LIMIT_BYTES)
    return found


def test_an_export_is_there_whole_or_not_at_all() -> None:
    undisturbed = a_place()
    exports(undisturbed)
    whole = contents(Files(undisturbed))
    assert sorted(whole) == sorted(["file", *NAMES])
    allowed: tuple[dict[str, bytes], ...] = ({}, {"file": whole["file"]}, whole)
    for trial in crash_points(a_place, exports, (*KILLS, *ERRORS)):
        assert contents(Files(trial.disk)) in allowed, str(trial)
        for words, state in crash_states(trial.disk):
            assert contents(Files(state)) in allowed, f"{trial}, {words}"
        if trial.is_finished:
            assert contents(Files(trial.disk)) == whole


def test_what_a_kill_left_does_not_stop_the_next_export() -> None:
    for trial in crash_points(a_place, exports, KILLS):
        files = Files(trial.disk)
        for path, again in ((FILE, to_safetensors), (FOLDER, None)):
            if files.find(path) is not None:
                continue
            if again is None:
                to_huggingface(STATE, CONFIG, path, files=files)
            else:
                again(STATE, path, files=files)
        assert sorted(contents(files)) == sorted(["file", *NAMES]), str(trial)
        assert [node.name for node in files.list_directory(Path("/out"))] == ["llama", "model.safetensors"]


def test_a_replacement_leaves_the_old_or_the_new_and_for_a_moment_both_beside_the_name() -> None:
    undisturbed = with_exports()
    old = contents(Files(undisturbed))
    replaces(undisturbed)
    new = contents(Files(undisturbed))
    assert old != new and sorted(old) == sorted(new)
    assert [node.name for node in Files(undisturbed).list_directory(Path("/out"))] == ["llama", "model.safetensors"]
    between = {**old, "file": new["file"]}
    for trial in crash_points(with_exports, replaces, (*KILLS, *ERRORS)):
        for words, state in ((str(trial), trial.disk), *crash_states(trial.disk)):
            found = contents(Files(state))
            assert found in (old, new, between) or _stand_beside(Files(state), old, new), f"{trial}, {words}"
        if trial.is_finished:
            assert contents(Files(trial.disk)) == new


def _stand_beside(files: Files, old: dict[str, bytes], new: dict[str, bytes]) -> bool:
    """Whether nothing has the folder's name, and both folders are whole under names beside it."""
    for name, expected in ((".llama.replaced", old), (".llama.partial", new)):
        for each in NAMES:
            path = FOLDER.with_name(name) / each
            if files.find(path) is None or files.read_bytes(path, limit_bytes=LIMIT_BYTES) != expected[each]:
                return False
    return files.find(FOLDER) is None and files.read_bytes(FILE, limit_bytes=LIMIT_BYTES) == new["file"]
