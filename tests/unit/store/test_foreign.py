"""Finding a checkpoint of another tool by its names: what is named wins, and nothing is taken instead of it."""

import json
from pathlib import Path

import pytest

from unbroken.errors import ForeignAmbiguous, ForeignKind, ForeignUnknown, NotAStore, PathMissing
from unbroken.store.foreign import ACCELERATE, DCP, GPT_SIMPLE, KEMPNERFORGE, PER_RANK, TRANSFORMERS, resolve_foreign
from unbroken.store.references import find_store


def touch(root: Path, *names: str, **texts: str) -> Path:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(texts.get(name, "{}"))
    return root


@pytest.fixture
def both(tmp_path: Path) -> Path:
    """Both kinds at step 200, the older folder name at step 100, and a step 300 that was never finished."""
    touch(tmp_path, "model_000200.pt", "meta_000200.json", "dcp_000200/.metadata")
    touch(tmp_path, "dist_ckpt_000100/.metadata", "dist_ckpt_000100/meta.json", "dcp_000300/.metadata")
    return tmp_path


@pytest.mark.promise("M1", "M5")
def test_a_file_a_folder_and_its_parent_name_the_same_checkpoints(both: Path) -> None:
    model = resolve_foreign(both / "model_000200.pt")
    assert (model.path, model.step, model.kind, model.tool) == (both / "model_000200.pt", 200, "model", PER_RANK)
    older = resolve_foreign(both / "dist_ckpt_000100")
    assert (older.path, older.step, older.kind, older.tool) == (both / "dist_ckpt_000100", 100, "dcp", DCP)
    assert resolve_foreign(both / "dcp_000200" / ".metadata").path == both / "dcp_000200"
    newest = resolve_foreign(both)
    assert (newest.path, newest.step, newest.is_named) == (both / "dcp_000200", 200, False)
    assert resolve_foreign(both, step=100).path == both / "dist_ckpt_000100"


@pytest.mark.promise("M2", "M6")
def test_dcp_is_looked_for_first_and_what_is_named_wins(both: Path) -> None:
    assert resolve_foreign(both).kind == "dcp"
    assert resolve_foreign(both / "model_000200.pt").kind == "model"
    assert resolve_foreign(both / "dcp_000200").kind == "dcp"
    (both / "dcp_000200" / ".metadata").unlink()
    assert resolve_foreign(both).kind == "model"


@pytest.mark.promise("M2")
def test_a_folder_without_meta_is_not_chosen_but_can_be_named(both: Path) -> None:
    assert resolve_foreign(both).step == 200
    assert resolve_foreign(both / "dcp_000300").step == 300


@pytest.mark.promise("M3")
def test_a_required_kind_is_never_substituted(both: Path) -> None:
    assert resolve_foreign(both, require_kind="model").path == both / "model_000200.pt"
    with pytest.raises(ForeignKind):
        resolve_foreign(both / "dcp_000200", require_kind="model")
    with pytest.raises(ForeignKind):
        resolve_foreign(both / "model_000200.pt", require_kind="dcp")
    # An older step of the kind is a substitute too.
    (both / "meta_000300.json").write_text("{}")
    with pytest.raises(ForeignKind) as refused:
        resolve_foreign(both, require_kind="model")
    assert refused.value.help()[0].command.startswith(f"unbroken import {both}/model_000200.pt")


@pytest.mark.promise("M5")
def test_a_bad_path_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(PathMissing):
        resolve_foreign(tmp_path / "nothing")
    for name, reason in (("notes.txt", "name of no file"), ("empty/x.txt", "known tool")):
        touch(tmp_path, name)
        path = tmp_path / name if "/" not in name else (tmp_path / name).parent
        with pytest.raises(ForeignUnknown, match=reason):
            resolve_foreign(path)
    touch(tmp_path, "zero/mp_rank_00_model_states.pt", "zero/zero_pp_rank_0_mp_rank_00_optim_states.pt")
    with pytest.raises(ForeignUnknown, match=r"zero_to_fp32\.py"):
        resolve_foreign(tmp_path / "zero")


def test_each_tool_is_recognised_by_its_names(tmp_path: Path) -> None:
    stated = json.dumps({"step": 7, "global_step": 7})
    for tool, names in {
        GPT_SIMPLE: ("trainer_state.json", "model/pytorch_model.bin"),
        KEMPNERFORGE: ("train_state.pt", "metadata.json", ".metadata"),
        TRANSFORMERS: ("trainer_state.json", "model.safetensors"),
    }.items():
        folder = tmp_path / tool / "checkpoint-9"
        touch(folder, *names, **dict.fromkeys(("trainer_state.json", "metadata.json"), stated))
        assert (resolve_foreign(folder).tool, resolve_foreign(folder).step) == (tool, 7)
        assert resolve_foreign(tmp_path / tool).path == folder
    # The number that Accelerate gives a folder counts saves, not steps.
    folder = touch(tmp_path / "accelerate" / "checkpoint_9", "random_states_0.pkl", "model.safetensors")
    assert (resolve_foreign(folder).tool, resolve_foreign(folder).step) == (ACCELERATE, None)
    assert resolve_foreign(touch(tmp_path / "step_9", "random_states_0.pkl", "model.safetensors")).step == 9


def test_a_run_of_gpt_simple_is_resolved_to_what_it_wrote_last(tmp_path: Path) -> None:
    for name, step in (("checkpoint-5", 5), ("checkpoint-6", 6), ("checkpoint-6-shutdown", 6), ("x.partial", 9)):
        folder = tmp_path / "checkpoints" / name
        touch(folder, "trainer_state.json", "model/pytorch_model.bin", **{"trainer_state.json": f'{{"step": {step}}}'})
    assert resolve_foreign(tmp_path).path.name == "checkpoint-6-shutdown"
    folder = tmp_path / "checkpoints" / "final"
    touch(folder, "trainer_state.json", "model/pytorch_model.bin", **{"trainer_state.json": '{"step": 6}'})
    assert resolve_foreign(tmp_path).path.name == "final"


def test_a_parent_that_is_not_clear_is_an_error_that_lists_the_candidates(tmp_path: Path) -> None:
    lightning = touch(tmp_path / "lightning", "epoch=0-step=3.ckpt", "last.ckpt")
    with pytest.raises(ForeignAmbiguous) as refused:
        resolve_foreign(lightning)
    assert [path.name for path in refused.value.candidates] == ["epoch=0-step=3.ckpt", "last.ckpt"]
    assert "their step" in refused.value.reason
    mixed = touch(tmp_path / "mixed", "checkpoint-3/trainer_state.json", "checkpoint-3/model.safetensors")
    touch(mixed, "dcp_000003/.metadata", "meta_000003.json")
    with pytest.raises(ForeignAmbiguous, match="different tools"):
        resolve_foreign(mixed)
    twice = touch(tmp_path / "twice", "dcp_000003/.metadata", "dist_ckpt_000003/.metadata", "meta_000003.json")
    with pytest.raises(ForeignAmbiguous, match="all are of step 3"):
        resolve_foreign(twice)
    done = touch(tmp_path / "done", "config.json", "model.safetensors")
    assert resolve_foreign(done).step is None
    touch(done, "checkpoint-3/trainer_state.json", "checkpoint-3/model.safetensors")
    with pytest.raises(ForeignAmbiguous, match="weights of its own"):
        resolve_foreign(done)


@pytest.mark.promise("M5")
def test_commands_that_need_a_run_name_the_command_that_makes_one(both: Path) -> None:
    for path in (both, both / "dcp_000200", both / "model_000200.pt"):
        with pytest.raises(NotAStore) as refused:
            find_store(path)
        assert f"unbroken import {path} runs/imported" in [each.command for each in refused.value.help()]
