"""Checkpoints of GPT-Simple and KempnerForge in our model: the same logits, the same moments, and training continues.

The checkpoints in ``tests/format/golden`` were written by those tools, which also computed the logits.
"""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import unbroken
from tests.exact.gpt_world import tiny, tokenize_text, write_text
from tests.unit.foreign.test_import import call
from tests.unit.foreign.test_read import dcp_folder
from unbroken import gpt
from unbroken.cli.main import main
from unbroken.config import Config, load
from unbroken.errors import CannotImport, GptSimpleRun, NotExact
from unbroken.gpt.checkpoint import find_model
from unbroken.gpt.export import to_safetensors, to_torch
from unbroken.gpt.huggingface import to_huggingface
from unbroken.gpt.model import GPT
from unbroken.gpt.optimizer import make_optimizer
from unbroken.launch.run_config import require_own_run
from unbroken.records.layout import Layout

GOLDEN = Path(__file__).parents[2] / "format" / "golden"
GPT_SIMPLE = GOLDEN / "gpt-simple-run"
KEMPNERFORGE = GOLDEN / "kempnerforge"
SHAPE = (
    "n_embd: 8, n_layer: 2, n_head: 2, n_kv_head: 1, n_positions: 32, intermediate_size: 16, vocab_size: 64, "
    "tie_word_embeddings: false"
)


def config_file(folder: Path, shape: str = SHAPE) -> Path:
    path = folder / "run.yaml"
    data = "path: data, tokenizer: bytes, max_length: 32, overlap_size: 0"
    path.write_text(f"model: {{{shape}}}\ndata: {{{data}}}\noptimizer: {{warmup_steps: 2}}\n")
    return path


def require_same_logits(run: Path, computed: Path) -> None:
    """Rotary angles are rounded in another order: the last bit of a logit may differ."""
    model = find_model(str(run)).load(torch.device("cpu")).model
    theirs = torch.load(computed, weights_only=True)
    with torch.no_grad():
        torch.testing.assert_close(model(theirs["tokens"]), theirs["logits"], rtol=1e-5, atol=1e-6)


def test_a_run_of_gpt_simple_has_its_logits_step_and_moments(tmp_path: Path) -> None:
    code, document = call(GPT_SIMPLE, tmp_path / "run")
    assert (code, document["tool"], document["step"]) == (0, "gpt-simple", 6)
    assert sorted(document["left_out"]) == ["dataloader_state", "rng", "scheduler.bin"]
    require_same_logits(tmp_path / "run", GPT_SIMPLE / "logits-final.pt")
    found = find_model(str(tmp_path / "run"))
    assert found.config.model.n_kv_head == 1 and found.config.training.global_batch_size == 4
    weights = torch.load(GPT_SIMPLE / "checkpoints/final/model/pytorch_model.bin", weights_only=True)
    theirs = torch.load(GPT_SIMPLE / "checkpoints/final/optimizer.bin", weights_only=True)
    matrices = [name for name, value in weights.items() if value.ndim >= 2]
    rows = [theirs["state"][matrices.index(f"h.1.attn.{name}_proj.weight")]["exp_avg"] for name in "qkv"]
    model = GPT(found.config.model)
    optimizer = make_optimizer(model, found.config.optimizer)
    unbroken.load(tmp_path / "run", model=model, optimizer=optimizer)
    kept = optimizer.state[model.get_parameter("blocks.1.attention.qkv.weight")]
    assert torch.equal(kept["exp_avg"], torch.cat(rows)) and float(kept["step"]) == 6


def test_kempnerforge_has_its_logits_with_the_model_of_a_config(tmp_path: Path) -> None:
    code, document = call(KEMPNERFORGE, tmp_path / "run", "--config", config_file(tmp_path))
    assert (code, document["tool"], document["kind"], document["step"]) == (0, "kempnerforge", "dcp", 4)
    assert document["items"]["optimizer"]["kind"] == "optimizer"
    require_same_logits(tmp_path / "run", KEMPNERFORGE / "logits.pt")
    # Without a config its names are kept, for a model class of its own.
    assert call(KEMPNERFORGE, tmp_path / "kept")[1]["items"]["scheduler"]["kind"] == "object"


@pytest.mark.parametrize(
    ("shape", "problems"),
    [
        (SHAPE.replace("n_layer: 2", "n_layer: 3"), 9),
        (SHAPE.replace("n_layer: 2", "n_layer: 1"), 9),
        (SHAPE.replace("intermediate_size: 16", "intermediate_size: 24"), 4),
        (SHAPE.replace("vocab_size: 64", "vocab_size: 65"), 1),
        (SHAPE + ", use_bias: true", 14),
    ],
)
def test_a_wrong_model_shape_lists_every_tensor_and_writes_nothing(tmp_path: Path, shape: str, problems: int) -> None:
    code, document = call(KEMPNERFORGE, tmp_path / "run", "--config", config_file(tmp_path, shape))
    assert (code, document["kind"], len(document["details"])) == (2, "cannot-import", problems)
    assert not (tmp_path / "run").exists()


def test_a_gpt_simple_model_that_ours_cannot_compute_is_an_error(tmp_path: Path) -> None:
    copy = tmp_path / "their run"
    shutil.copytree(GPT_SIMPLE, copy)
    said = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**said, "model": {**said["model"], "activation": "gelu"}}))
    code, document = call(copy, tmp_path / "run")
    assert (code, document["kind"]) == (2, "cannot-import") and "tanh" in document["details"][0]
    scaled = {**said["model"], "rope_scaling_type": "ntk", "rope_scaling_factor": 2.0}
    (copy / "config.json").write_text(json.dumps({**said, "model": scaled}))
    assert call(copy, tmp_path / "run")[0] == 0
    assert find_model(str(tmp_path / "run")).config.model.rope_base == 20000.0
    (copy / "config.json").unlink()
    code, document = call(copy, tmp_path / "other")
    assert (code, document["kind"]) == (2, "cannot-import") and "--config" in document["help"][0]["command"]


def test_a_run_of_gpt_simple_in_output_dir_names_the_import(tmp_path: Path) -> None:
    with pytest.raises(GptSimpleRun) as refused:
        require_own_run(Layout(GPT_SIMPLE))
    command = refused.value.help()[0].command
    assert command == f"unbroken import {GPT_SIMPLE} {GPT_SIMPLE}-imported"


@pytest.mark.promise("M5")
def test_every_command_names_the_import_in_a_run_of_gpt_simple(capsys: pytest.CaptureFixture[str]) -> None:
    command = f"unbroken import {GPT_SIMPLE} runs/imported"
    for name, code in (("ls", 0), ("status", 0), ("show", 5), ("verify", 5), ("evaluate", 5)):
        assert main([name, str(GPT_SIMPLE)]) == code
        assert command in capsys.readouterr().err, name


@pytest.mark.parametrize("form", ["llama", "model.pt", "model.safetensors"])
def test_an_export_comes_back(tmp_path: Path, form: str) -> None:
    config = load(config_file(tmp_path)).config.model
    model = GPT(config)
    if form == "llama":
        to_huggingface(model.state_dict(), config, tmp_path / form)
    else:
        (to_torch if form.endswith(".pt") else to_safetensors)(model.state_dict(), tmp_path / form)
    code, document = call(tmp_path / form, tmp_path / "run", "--config", tmp_path / "run.yaml", "--step", "9")
    assert (code, document["step"]) == (0, 9)
    found = find_model(str(tmp_path / "run")).load(torch.device("cpu")).model
    assert all(torch.equal(value, found.state_dict()[name]) for name, value in model.state_dict().items())


def test_weights_in_16_bits_become_those_that_the_trainer_keeps(tmp_path: Path) -> None:
    model = GPT(load(config_file(tmp_path)).config.model)
    to_torch(model.state_dict(), tmp_path / "model.pt", dtype=torch.bfloat16)
    assert call(tmp_path / "model.pt", tmp_path / "run", "--config", tmp_path / "run.yaml", "--step", "9")[0] == 0
    found = find_model(str(tmp_path / "run")).load(torch.device("cpu")).model.state_dict()
    assert all(value.dtype == torch.float32 for value in found.values())
    assert all(torch.equal(found[name], value.bfloat16().float()) for name, value in model.state_dict().items())


def test_unknown_names_are_an_error(tmp_path: Path) -> None:
    torch.save({"weight": torch.ones(2)}, tmp_path / "step-3.pt")
    code, document = call(tmp_path / "step-3.pt", tmp_path / "run", "--config", config_file(tmp_path))
    assert (code, document["kind"]) == (2, "cannot-import") and "wte.weight" in document["details"][0]


def test_an_imported_run_trains_on_and_resumes_without_asking_again(tmp_path: Path) -> None:
    """Step 6 of GPT-Simple becomes step 7 and 8 of ours, with our optimizer continuing its moments."""
    data = tokenize_text(write_text(tmp_path / "text"), tmp_path / "data")
    run = tmp_path / "run"
    given = tiny(data, run, max_steps=8, save_steps=1)
    shape = find_config(GPT_SIMPLE).model
    config = replace(given, model=replace(shape, vocab_size=512), data=replace(given.data, max_length=32))
    (tmp_path / "run.yaml").write_text(json.dumps(config.values()))
    code, document = call(GPT_SIMPLE, run, "--config", tmp_path / "run.yaml")
    assert code == 0, document
    before = find_model(str(run)).load(torch.device("cpu")).model.state_dict()
    with pytest.raises(NotExact) as refused:
        gpt.train(config=config)
    assert {name for name, _ in refused.value.differences} == {"arithmetic", "data", "rng_state"}
    stopped = replace(config, training=replace(config.training, max_steps=7))
    accept = ("arithmetic", "data", "rng_state", "training.max_steps")
    assert gpt.train(config=stopped, accept=accept).step == 7
    # What was accepted is in the new checkpoint: the next job resumes exactly.
    trained = gpt.train(config=config, accept=("training.max_steps",))
    assert (trained.step, trained.is_completed) == (8, True)
    after = find_model(str(run)).load(torch.device("cpu")).model.state_dict()
    assert all(not torch.equal(before[name], after[name]) for name in before)


KEMPNERFORGE_PARTS = {
    "attention.qkv": ("attention.q_proj", "attention.k_proj", "attention.v_proj"),
    "attention.out": ("attention.o_proj",),
    "mlp.gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.down": ("mlp.down_proj",),
}


def save_kempnerforge(folder: Path, config: Config, step: int) -> nn.Module:
    """A checkpoint in the form of KempnerForge, of a model with the shapes of ours; returns that model, trained."""
    model, ours = nn.Module(), config.model
    rows = {"attention.qkv": [ours.n_embd, *[ours.n_embd // ours.n_head * (ours.n_kv_head or ours.n_head)] * 2]}
    with torch.device("meta"):
        state = GPT(ours).state_dict()
    torch.manual_seed(1)
    for name, value in state.items():
        called = name.removesuffix(".weight").replace("blocks.", "layers.")
        called = {"embedding": "token_embedding.embedding", "head": "output_head.proj"}.get(called, called)
        part = ".".join(called.split(".")[2:])
        theirs = KEMPNERFORGE_PARTS.get(part, (part,))
        cuts = rows.get(part, [len(value) // len(theirs)] * len(theirs))
        for each, cut in zip(theirs, cuts, strict=True):
            here = model
            *above, last = (
                f"{called.removesuffix(part)}{each}.weight".split(".") if part else [*called.split("."), "weight"]
            )
            for attribute in above:
                if not hasattr(here, attribute):
                    here.add_module(attribute, nn.Module())
                here = here.get_submodule(attribute)
            here.register_parameter(last, nn.Parameter(torch.randn(cut, *value.shape[1:]) / 8))
    matrices = [each for each in model.parameters() if each.ndim >= 2]
    others = [each for each in model.parameters() if each.ndim < 2]
    optimizer = torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}])
    for _ in range(step):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter) / 8
        optimizer.step()
    dcp_folder(folder, {"model": model, "optimizer": optimizer})
    (folder / "metadata.json").write_text(json.dumps({"step": step, "tokens_seen": 100}))
    torch.save({"step": step, "tokens_seen": 100, "scheduler": {"last_epoch": step}}, folder / "train_state.pt")
    model.moments = {name: optimizer.state[each]["exp_avg"] for name, each in model.named_parameters()}  # type: ignore[assignment]
    return model


@pytest.mark.promise("M5")
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("way", ["import", "load_path"])
def test_a_checkpoint_of_kempnerforge_trains_on_at_its_next_step(tmp_path: Path, way: str) -> None:
    data = tokenize_text(write_text(tmp_path / "text"), tmp_path / "data")
    run, source = tmp_path / "run", tmp_path / "ckpt" / "step_4"
    given = tiny(data, run, max_steps=6, save_steps=1)
    shape = load(config_file(tmp_path, SHAPE.replace("vocab_size: 64", "vocab_size: 512"))).config.model
    config = replace(given, model=shape, data=replace(given.data, max_length=32))
    (tmp_path / "run.yaml").write_text(json.dumps(config.values()))
    theirs = save_kempnerforge(source, config, 4)
    if way == "import":
        code, document = call(source, run, "--config", tmp_path / "run.yaml")
        assert (code, document["step"]) == (0, 4), document
    else:
        config = replace(config, training=replace(config.training, load_path=str(tmp_path / "ckpt")))
    stopped = replace(config, training=replace(config.training, max_steps=5))
    with pytest.raises(NotExact) as refused:
        gpt.train(config=config)
    assert {name for name, _ in refused.value.differences} == {"arithmetic", "data", "rng_state"}
    accept = ("arithmetic", "data", "rng_state", "training.max_steps")
    assert gpt.train(config=stopped, accept=accept).step == 5
    # Later jobs resume from the run's own checkpoints, exactly.
    assert gpt.train(config=config, accept=("training.max_steps",)).step == 6
    model = GPT(shape)
    optimizer = make_optimizer(model, config.optimizer)
    unbroken.load(f"{run}@5", model=model, optimizer=optimizer)
    state = optimizer.state[model.get_parameter("blocks.1.attention.qkv.weight")]
    assert float(state["step"]) == 5
    # One step of ours moved what four of theirs had made: the first moment is theirs, mostly.
    names = [f"layers.1.attention.{each}_proj.weight" for each in "qkv"]
    moments: Any = theirs.moments
    before = torch.cat([moments[name] for name in names])
    assert torch.cosine_similarity(state["exp_avg"].flatten(), before.flatten(), dim=0) > 0.9
    weights = torch.cat([theirs.get_parameter(name) for name in names])
    assert 0 < (model.get_parameter("blocks.1.attention.qkv.weight") - weights).abs().max() < 0.1


@pytest.mark.parametrize("wrapped", [False, True])
def test_the_model_of_the_trainer_loads_what_gpt_simple_wrote(tmp_path: Path, wrapped: bool) -> None:
    """Names are mapped as the import maps them; a config that computes otherwise is an error."""
    shape = find_config(GPT_SIMPLE).model
    model = GPT(shape, 512)
    live = torch.compile(model, backend="eager") if wrapped else model
    optimizer = make_optimizer(model, find_config(GPT_SIMPLE).optimizer)
    found = unbroken.load(GPT_SIMPLE, model=live, optimizer=optimizer)
    assert found.step == 6 and "rng" in found.left_out
    theirs = torch.load(GPT_SIMPLE / "logits-final.pt", weights_only=True)
    with torch.no_grad():
        torch.testing.assert_close(model(theirs["tokens"]), theirs["logits"], rtol=1e-5, atol=1e-6)
    assert {float(state["step"]) for state in optimizer.state.values()} == {6}
    other = GPT(replace(shape, norm_eps=1e-3, n_head=4, n_kv_head=2), 512)
    with pytest.raises(CannotImport) as refused:
        unbroken.load(GPT_SIMPLE, model=other)
    assert [each.partition(":")[0] for each in refused.value.problems] == ["n_head", "norm_eps", "n_kv_head"]


def save_llama(folder: Path) -> Any:  # noqa: ANN401 -- Transformers' models have no types
    """A checkpoint as Transformers' trainer writes one; most matrices have the same shape, as in no real model."""
    config = LlamaConfig(
        vocab_size=64, hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=32, rms_norm_eps=1e-5, tie_word_embeddings=False,
    )  # fmt: skip
    model: Any = LlamaForCausalLM(config)  # type: ignore[no-untyped-call]
    matrices = [each for each in model.parameters() if each.ndim >= 2]
    others = [each for each in model.parameters() if each.ndim < 2]
    optimizer = torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}])
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    model.save_pretrained(folder)
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    (folder / "trainer_state.json").write_text('{"global_step": 1}')
    named = {each: name for name, each in model.named_parameters()}
    torch.save({named[each]: kept for each, kept in optimizer.state.items()}, folder.parent / "moments.pt")
    return model


LLAMA_SHAPE = SHAPE.replace("intermediate_size: 16", "intermediate_size: 8").replace("n_kv_head: 1", "n_kv_head: 2")


def test_the_moments_of_a_llama_are_those_of_its_parameters_though_its_file_is_sorted(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-1").mkdir()
    theirs = save_llama(tmp_path / "checkpoint-1")
    code, document = call(tmp_path / "checkpoint-1", tmp_path / "run", "--config", config_file(tmp_path, LLAMA_SHAPE))
    assert (code, document["tool"], document["step"]) == (0, "transformers", 1), document
    found = find_model(str(tmp_path / "run"))
    model = GPT(found.config.model)
    optimizer = make_optimizer(model, found.config.optimizer)
    unbroken.load(tmp_path / "run", model=model, optimizer=optimizer)
    tokens = torch.arange(12).reshape(1, 12)
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), theirs(tokens).logits, rtol=1e-5, atol=1e-6)
    moments = torch.load(tmp_path / "moments.pt", weights_only=True)
    inner = {"q": "self_attn.q_proj", "gate": "mlp.gate_proj", "up": "mlp.up_proj", "o": "self_attn.o_proj"}
    kept = {name: moments[f"model.layers.1.{each}.weight"]["exp_avg"] for name, each in inner.items()}
    ours = {name: optimizer.state[each]["exp_avg"] for name, each in model.named_parameters()}
    assert torch.equal(ours["blocks.1.mlp.gate_up.weight"], torch.cat([kept["gate"], kept["up"]]))
    assert torch.equal(ours["blocks.1.attention.qkv.weight"][:8], kept["q"])
    assert torch.equal(ours["blocks.1.attention.out.weight"], kept["o"])
    assert torch.equal(
        ours["blocks.0.mlp_norm.weight"], moments["model.layers.0.post_attention_layernorm.weight"]["exp_avg"]
    )


def test_a_config_that_computes_otherwise_than_the_llama_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-1").mkdir()
    save_llama(tmp_path / "checkpoint-1")
    shape = f"{LLAMA_SHAPE}, norm_eps: 1.0e-3, rope_base: 500000".replace("n_head: 2", "n_head: 4")
    code, document = call(tmp_path / "checkpoint-1", tmp_path / "run", "--config", config_file(tmp_path, shape))
    assert code == 2 and not (tmp_path / "run").exists()
    said = " ".join(document["details"])
    assert all(f"{name}: " in said for name in ("num_attention_heads", "rms_norm_eps", "rope rope_theta")), said


def find_config(run: Path) -> Config:
    return load(run / "config.json").config
