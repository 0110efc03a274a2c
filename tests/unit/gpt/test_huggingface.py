"""The folder for transformers: loaded there, it gives our logits; what a Llama is not is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.gpt.models import config_of, error, model_of, tokens_of
from unbroken.config.sections import ModelConfig
from unbroken.errors import NotExpressible, WouldOverwrite
from unbroken.gpt import GPT, Sampling, generate, to_huggingface

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

EXPRESSIBLE: dict[str, dict[str, Any]] = {
    "defaults": {},
    "grouped heads": {"n_kv_head": 2},
    "one key head": {"n_kv_head": 1},
    "untied": {"tie_word_embeddings": False},
    "linear": {"rope_scaling_type": "linear", "rope_scaling_factor": 2.0},
    "yarn": {"rope_scaling_type": "yarn", "rope_scaling_factor": 4.0, "n_positions": 512, "n_embd": 64},
    "gelu": {"activation": "gelu"},
    "relu": {"activation": "relu"},
    "biases": {"use_bias": True},
    "qkv bias": {"qkv_bias": True},
    "out bias": {"attn_out_bias": True},
    "mlp bias": {"mlp_bias": True},
    "other base and eps": {"rope_base": 500.0, "norm_eps": 1e-3, "intermediate_size": 40},
    "document masks": {"attention_mode": "flex"},
}


def loaded(model: GPT, folder: Path, **options: Any) -> Any:  # noqa: ANN401 -- a model of transformers
    to_huggingface(model.state_dict(), model.config, folder, **options)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()


@pytest.mark.promise("G21")
@pytest.mark.parametrize("options", list(EXPRESSIBLE.values()), ids=list(EXPRESSIBLE))
def test_transformers_gives_our_logits(options: dict[str, Any], tmp_path: Path) -> None:
    model = model_of(config_of(**options)).eval()
    theirs = loaded(model, tmp_path / "llama")
    tokens = tokens_of()
    with torch.no_grad():
        assert error(theirs(tokens).logits, model(tokens)) < 2e-6
    assert type(theirs).__name__ == "LlamaForCausalLM"
    assert sum(p.numel() for p in theirs.parameters()) >= model.config.parameters(model.vocab_size)


@pytest.mark.promise("G21")
def test_the_presets_shape_has_the_same_logits_bit_for_bit(tmp_path: Path) -> None:
    config = ModelConfig(vocab_size=256, n_embd=128, n_layer=2, n_head=4, n_positions=64)
    model = model_of(config).eval()
    theirs = loaded(model, tmp_path / "llama")
    tokens = torch.randint(256, (2, 64), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(model(tokens), theirs(tokens).logits)


def test_greedy_text_is_the_same_on_both_sides(tmp_path: Path) -> None:
    model = model_of(config_of())
    theirs = loaded(model, tmp_path / "llama")
    found = theirs.generate(torch.tensor([[5, 6]]), max_new_tokens=20, do_sample=False)[0, 2:].tolist()
    assert generate(model, [5, 6], max_new_tokens=20, sampling=Sampling(is_greedy=True)) == found


@pytest.mark.parametrize(
    "options", [{"norm": "layernorm"}, {"mlp_type": "mlp"}, {"rope_scaling_type": "ntk"}], ids=lambda o: next(iter(o))
)
def test_what_a_llama_cannot_express_is_refused_by_name(options: dict[str, Any], tmp_path: Path) -> None:
    model = model_of(config_of(**options))
    ((field, value),) = options.items()
    with pytest.raises(NotExpressible, match=rf"does not support model\.{field} {value}"):
        to_huggingface(model.state_dict(), model.config, tmp_path / "llama")
    assert list(tmp_path.iterdir()) == []


def test_every_inexpressible_option_is_named_at_once(tmp_path: Path) -> None:
    model = model_of(config_of(norm="layernorm", mlp_type="mlp", rope_scaling_type="ntk"))
    with pytest.raises(NotExpressible) as caught:
        to_huggingface(model.state_dict(), model.config, tmp_path / "llama")
    assert len(caught.value.options) == 3


def test_a_folder_that_exists_is_never_replaced(tmp_path: Path) -> None:
    model = model_of(config_of())
    (tmp_path / "llama").mkdir()
    with pytest.raises(WouldOverwrite):
        to_huggingface(model.state_dict(), model.config, tmp_path / "llama")
    assert list((tmp_path / "llama").iterdir()) == []


def test_the_tokenizer_the_end_token_and_the_dtype_come_along(tmp_path: Path) -> None:
    model = model_of(config_of())
    tokenizer = b'{"added_tokens": [{"id": 7, "content": "<end>"}]}'
    theirs = loaded(model, tmp_path / "llama", tokenizer=tokenizer, end_token=7, dtype=torch.bfloat16)
    assert (tmp_path / "llama" / "tokenizer.json").read_bytes() == tokenizer
    assert json.loads((tmp_path / "llama" / "tokenizer_config.json").read_text()) == {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": model.config.n_positions,
        "bos_token": "<end>",
        "eos_token": "<end>",
    }
    assert theirs.dtype == torch.bfloat16
    assert theirs.generation_config.eos_token_id == 7
    assert json.loads((tmp_path / "llama" / "config.json").read_text())["eos_token_id"] == 7
    names = sorted(path.name for path in (tmp_path / "llama").iterdir())
    tokenizer_names = ["tokenizer.json", "tokenizer_config.json"]
    assert names == ["config.json", "generation_config.json", "model.safetensors", *tokenizer_names]


def test_only_an_export_is_replaced_and_only_on_request(tmp_path: Path) -> None:
    first, second = model_of(config_of()), model_of(config_of(n_layer=1))
    folder = tmp_path / "llama"
    for model in (first, second):
        to_huggingface(model.state_dict(), model.config, folder, is_replacing=True)
    assert json.loads((folder / "config.json").read_text())["num_hidden_layers"] == 1
    assert [path.name for path in tmp_path.iterdir()] == ["llama"]
    (folder / "thesis").mkdir()
    with pytest.raises(WouldOverwrite):
        to_huggingface(first.state_dict(), first.config, folder, is_replacing=True)
    assert (folder / "thesis").is_dir()
    assert [path.name for path in tmp_path.iterdir()] == ["llama"]
