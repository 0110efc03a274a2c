"""A folder that ``transformers`` loads as a Llama: config, weights, generation config and, if given, the tokenizer.

The weights are ours under Llama's names, with the fused matrices split by rows; rotary positions are laid out alike, so
nothing is permuted and the logits are the same. What a Llama cannot express is an error, raised before anything is
written. A bias that Llama has and ours lacks is written as zeros.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from unbroken.config.sections import ModelConfig
from unbroken.errors import NotExpressible
from unbroken.files import LOCAL, Files
from unbroken.gpt.export import publish, safetensors_chunks
from unbroken.gpt.rope import original_positions

ACTIVATIONS: Final = {"swish": "silu", "gelu": "gelu", "relu": "relu"}
TOKENIZER_FILE: Final = "tokenizer.json"


def to_huggingface(
    state: Mapping[str, Tensor],
    config: ModelConfig,
    folder: Path,
    *,
    tokenizer: bytes | None = None,
    end_token: int | None = None,
    dtype: torch.dtype | None = None,
    is_replacing: bool = False,
    files: Files = LOCAL,
) -> None:
    """Write a folder for ``AutoModelForCausalLM.from_pretrained``.

    Args:
        state: the model's state, by the names that ``model`` documents.
        config: its config.
        folder: where; it must not exist yet, unless an earlier export is to be replaced.
        tokenizer: the contents of a ``tokenizer.json``, for ``AutoTokenizer``.
        end_token: the token that ends a text, for ``generate`` of transformers.
        dtype: of the weights in the file; None keeps theirs.
        is_replacing: whether a folder that an export wrote may be replaced; no other ever is.
        files: what writes.

    Raises:
        NotExpressible: a Llama has no such option; all of them are named.
        WouldOverwrite: the folder exists, and is not to be replaced or holds something else than an export.
        StorageFailed: an I/O error.
    """
    require_expressible(config)
    weights = llama_state(state, config)
    written_as = dtype or state["embedding.weight"].dtype
    settings = llama_config(config, len(state["embedding.weight"]), written_as, end_token)
    ends = {"_from_model_config": True, "bos_token_id": end_token, "eos_token_id": end_token}

    def write(scratch: Path) -> None:
        files.make_directory(scratch)
        files.write_new(scratch / "model.safetensors", safetensors_chunks(weights, dtype))
        files.write_new(scratch / "config.json", [_encoded(settings)])
        files.write_new(scratch / "generation_config.json", [_encoded(ends)])
        if tokenizer is not None:
            files.write_new(scratch / TOKENIZER_FILE, [tokenizer])
            described = tokenizer_config(tokenizer, end_token, config.n_positions)
            files.write_new(scratch / "tokenizer_config.json", [_encoded(described)])
        files.sync_directory(scratch)

    publish(folder, write, files, is_replacing=is_replacing)


def tokenizer_config(content: bytes, end_token: int | None, positions: int) -> dict[str, Any]:
    """The contents of ``tokenizer_config.json``: the file is taken as it is, and not made into a Llama's."""
    found: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": positions}
    word = None if end_token is None else _word(content, end_token)
    if word is not None:
        found |= {"bos_token": word, "eos_token": word}
    return found


def _word(content: bytes, number: int) -> str | None:
    described = json.loads(content)
    for token in described.get("added_tokens") or ():
        if token.get("id") == number:
            return str(token["content"])
    vocabulary = (described.get("model") or {}).get("vocab")
    pairs = vocabulary.items() if isinstance(vocabulary, dict) else ()
    return next((word for word, each in pairs if each == number), None)


def require_expressible(config: ModelConfig) -> None:
    """Refuse a config with options that a Llama does not have.

    Raises:
        NotExpressible: there are some; all of them are named.
    """
    problems = tuple(inexpressible(config))
    if problems:
        raise NotExpressible(target="a Llama of transformers", options=problems)


def inexpressible(config: ModelConfig) -> Iterator[str]:
    """Every option of a config that a Llama does not have, as field and value."""
    if config.norm != "rmsnorm":
        yield f"model.norm {config.norm}"
    if config.mlp_type != "gated":
        yield f"model.mlp_type {config.mlp_type}"
    if config.rope_scaling_type == "ntk":
        yield "model.rope_scaling_type ntk"


def llama_config(
    config: ModelConfig, vocab_size: int, dtype: torch.dtype, end_token: int | None = None
) -> dict[str, Any]:
    """The contents of ``config.json``."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": config.n_embd,
        "intermediate_size": config.mlp_width,
        "num_hidden_layers": config.n_layer,
        "num_attention_heads": config.n_head,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.n_embd // config.n_head,
        "hidden_act": ACTIVATIONS[config.activation],
        "max_position_embeddings": config.n_positions,
        "initializer_range": 0.02,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_word_embeddings,
        "attention_bias": config.has_qkv_bias or config.has_attn_out_bias,
        "mlp_bias": config.has_mlp_bias,
        "attention_dropout": 0.0,
        # Both spellings: the first is read by transformers 5, the others by 4.
        "rope_parameters": {"rope_theta": config.rope_base, **_rope(config)},
        "rope_theta": config.rope_base,
        "rope_scaling": _rope(config) if config.rope_scaling_type else None,
        "bos_token_id": end_token,
        "eos_token_id": end_token,
        "dtype": str(dtype).removeprefix("torch."),
        "torch_dtype": str(dtype).removeprefix("torch."),
    }


def _rope(config: ModelConfig) -> dict[str, Any]:
    match config.rope_scaling_type:
        case "linear":
            return {"rope_type": "linear", "factor": config.rope_scaling_factor}
        case "yarn":
            original = original_positions(config)
            factor = config.rope_scaling_factor
            return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
        case _:
            return {"rope_type": "default"}


def llama_state(state: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """The weights under Llama's names."""
    found = {"model.embed_tokens.weight": state["embedding.weight"], "model.norm.weight": state["norm.weight"]}
    if not config.tie_word_embeddings:
        found["lm_head.weight"] = state["head.weight"]
    for layer in range(config.n_layer):
        ours, theirs = f"blocks.{layer}.", f"model.layers.{layer}."
        block = {name.removeprefix(ours): tensor for name, tensor in state.items() if name.startswith(ours)}
        found |= {theirs + name: tensor for name, tensor in _llama_block(block, config)}
    return found


def _llama_block(block: Mapping[str, Tensor], config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    yield "input_layernorm.weight", block["attention_norm.weight"]
    yield "post_attention_layernorm.weight", block["mlp_norm.weight"]
    width = config.n_embd // config.n_head
    rows = {"q": config.n_head * width, "k": config.kv_heads * width, "v": config.kv_heads * width}
    has_bias = config.has_qkv_bias or config.has_attn_out_bias
    for kind in ("weight", "bias") if has_bias else ("weight",):
        qkv, out = (_or_zeros(block, f"attention.{name}.{kind}", count) for name, count in _attention_rows(config))
        for letter, part in zip(rows, torch.split(qkv, list(rows.values())), strict=True):
            yield f"self_attn.{letter}_proj.{kind}", part
        yield f"self_attn.o_proj.{kind}", out
    for kind in ("weight", "bias") if config.has_mlp_bias else ("weight",):
        gate, up = block[f"mlp.gate_up.{kind}"].chunk(2)
        yield f"mlp.gate_proj.{kind}", gate
        yield f"mlp.up_proj.{kind}", up
        yield f"mlp.down_proj.{kind}", block[f"mlp.down.{kind}"]


def _attention_rows(config: ModelConfig) -> tuple[tuple[str, int], tuple[str, int]]:
    width = config.n_embd // config.n_head
    return ("qkv", (config.n_head + 2 * config.kv_heads) * width), ("out", config.n_embd)


def _or_zeros(block: Mapping[str, Tensor], name: str, rows: int) -> Tensor:
    weight = block["attention.qkv.weight"]
    return block.get(name, torch.zeros(rows, dtype=weight.dtype, device=weight.device))


def _encoded(fields: Mapping[str, Any]) -> bytes:
    return (json.dumps(fields, indent=2, sort_keys=True) + "\n").encode()
