"""Weights and optimizer state of other tools' decoders under the names of our model.

Our query, key and value rows are one matrix, and so are gate and up: theirs are put one below the other, and so are the
moments of the optimizer, which AdamW updates element by element. Rotary positions are laid out alike in all of them, so
nothing is permuted. What our model computes differently is an error before anything is written.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch

from unbroken.config import Config, load
from unbroken.config.sections import ModelConfig
from unbroken.errors import CannotImport, ConfigInvalid, ConfigUnreadable, Help
from unbroken.errors.foreign import ImportCall
from unbroken.foreign.items import MODULE, OPTIMIZER, Contents, ForeignItem
from unbroken.gpt.huggingface import llama_config
from unbroken.gpt.model import GPT
from unbroken.state.items import State
from unbroken.state.numbered import NUMBERED
from unbroken.store.foreign import GPT_SIMPLE, Foreign, read_json

# Options that a learning rate scheduler adds to a group; our rate is a function of the step.
_OF_SCHEDULERS: Final = ("initial_lr",)


@dataclass(frozen=True)
class Names:
    """What another tool calls the matrices of a decoder; ``plain_up`` and ``plain_down`` where its MLP has no gate."""

    embedding: str
    block: str
    attention_norm: str
    query: str
    key: str
    value: str
    out: str
    mlp_norm: str
    gate: str
    up: str
    down: str
    norm: str
    head: str
    plain_up: str
    plain_down: str


# Llama in Transformers.
LLAMA: Final = Names(
    *("model.embed_tokens", "model.layers.{}.", "input_layernorm"),
    *("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "post_attention_layernorm"),
    *("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "model.norm", "lm_head", "mlp.up_proj", "mlp.down_proj"),
)
NAMES: Final = (
    # GPT-Simple.
    Names(
        *("wte", "h.{}.", "ln_1", "attn.q_proj", "attn.k_proj", "attn.v_proj", "attn.c_proj"),
        *("ln_2", "mlp.c_gate", "mlp.c_up", "mlp.c_down", "ln_f", "lm_head", "mlp.c_fc", "mlp.c_proj"),
    ),
    # KempnerForge.
    Names(
        *("token_embedding.embedding", "layers.{}.", "attention_norm"),
        *("attention.q_proj", "attention.k_proj", "attention.v_proj", "attention.o_proj", "mlp_norm"),
        *("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "norm", "output_head.proj"),
        *("mlp.up_proj", "mlp.down_proj"),
    ),
    LLAMA,
)
# What a config.json of Transformers says about how a Llama computes, beyond what the shapes show.
_LLAMA_FIELDS: Final = (
    *("num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps", "tie_word_embeddings"),
)
# What the config.json of a GPT-Simple run says about how its model computes, beyond what the shapes show.
_GPT_SIMPLE_FIELDS: Final = (
    *("n_head", "activation", "mlp_type", "norm", "norm_eps", "rope_base", "rope_scaling_type", "rope_scaling_factor"),
)
# Our own, as an export has them: query, key and value are one matrix already, and so are gate and up.
OURS: Final = Names(
    *("embedding", "blocks.{}.", "attention_norm", "attention.qkv", "", "", "attention.out"),
    *("mlp_norm", "mlp.gate_up", "", "mlp.down", "norm", "head", "mlp.up", "mlp.down"),
)


@dataclass(frozen=True)
class MappedConfig:
    """The config to map to, and its file; ``overrides`` are what that needs on the command line of `unbroken train`."""

    config: Config
    file: Path
    overrides: tuple[str, ...] = ()


def config_of(source: Foreign, config: Path | None) -> MappedConfig | None:
    """The config to map to: the given file, or that of a GPT-Simple run; None where there is neither.

    Raises:
        ConfigInvalid: it has problems; lists all of them.
        ConfigUnreadable: it cannot be read.
        CannotImport: it describes a model that ours is not.
    """
    if config is not None:
        return MappedConfig(load(config).config, config)
    own = source.path.absolute().parent.parent / "config.json"
    if source.tool != GPT_SIMPLE or not own.is_file():
        return None
    found = load(own).config
    model = _as_gpt_simple_computes(source, found.model)
    before, after = asdict(found.model), asdict(model)
    changed = {name: value for name, value in after.items() if value != before[name]}
    overrides = tuple(f"model.{name}={'null' if value is None else value}" for name, value in changed.items())
    # How its last job was started says nothing about the new run.
    return MappedConfig(replace(found, model=model, training=replace(found.training, resume="auto")), own, overrides)


def _as_gpt_simple_computes(source: Foreign, model: ModelConfig) -> ModelConfig:
    if model.activation == "gelu":
        problem = "model.activation: its gelu is the tanh approximation, ours is exact; the logits would differ"
        raise CannotImport(path=source.path, problems=(problem,))
    if model.rope_scaling_type == "ntk":
        # Its base is multiplied by the factor, ours by a power of it.
        base = model.rope_base * model.rope_scaling_factor
        model = replace(model, rope_base=base, rope_scaling_type=None, rope_scaling_factor=1.0)
    rows = read_json(source.path / "model" / "config.json").get("vocab_size")
    if model.vocab_size is not None and isinstance(rows, int):
        # It rounds up a vocab_size that is set, too.
        model = replace(model, vocab_size=rows)
    return model


def map_names(source: Foreign, contents: Contents, model: ModelConfig) -> list[str]:
    """Give model and optimizer the names of our trainer; returns every problem, and then nothing was changed."""
    return _other_llama(source, model) or _other_gpt_simple(source, model) or _rename(contents, model)


def _other_gpt_simple(source: Foreign, model: ModelConfig) -> list[str]:
    """Where the config of a GPT-Simple run says that its model computes otherwise than the one to map to."""
    try:
        theirs = config_of(source, None)
    except (ConfigInvalid, ConfigUnreadable):
        theirs = None
    if theirs is None:
        return []
    pairs = [(name, getattr(theirs.config.model, name), getattr(model, name)) for name in _GPT_SIMPLE_FIELDS]
    pairs.append(
        ("n_kv_head", theirs.config.model.n_kv_head or theirs.config.model.n_head, model.n_kv_head or model.n_head)
    )
    return [
        f"{name}: {value} in its config.json, {wanted} in the config to map to"
        for name, value, wanted in pairs
        if value != wanted
    ]


def _other_llama(source: Foreign, model: ModelConfig) -> list[str]:
    """Where the config.json beside a Llama says that it computes otherwise than the config to map to."""
    folder = source.path if source.path.is_dir() else source.path.parent
    theirs = read_json(folder / "config.json")
    if theirs.get("model_type") != "llama":
        return []
    ours = llama_config(model, 0, torch.float32)
    # Transformers 5 keeps all of rope in one field, 4 in two.
    rope = theirs.get("rope_parameters") or {
        **(theirs.get("rope_scaling") or {}),
        "rope_theta": theirs.get("rope_theta"),
    }
    stated = {**{name: theirs.get(name) for name in _LLAMA_FIELDS}, **{f"rope {name}": rope[name] for name in rope}}
    wanted = {**ours, **{f"rope {name}": value for name, value in ours["rope_parameters"].items()}}
    return [
        f"{name}: {value} in its config.json, {wanted.get(name, 'not available')} in the config to map to"
        for name, value in stated.items()
        if value is not None and value != wanted.get(name)
    ]


def _rename(contents: Contents, model: ModelConfig) -> list[str]:
    if "model" not in contents.items:
        return ["model: not in the checkpoint"]
    theirs = contents.items["model"].state
    # By the names that are there: a model of one tool may have been saved by another.
    names = next((each for each in (OURS, *NAMES) if f"{each.embedding}.weight" in theirs), None)
    if names is None:
        known = ", ".join(f"{each.embedding}.weight" for each in (OURS, *NAMES))
        return [f"model: it has none of {known}; other names cannot be mapped to the model of `unbroken train`"]
    theirs = _untied(theirs, names, model)
    parts = dict(_parts(names, model))
    problems = _misfits(theirs, parts, names, model)
    if problems:
        return problems
    renamed = {ours: _joined([theirs[name] for name in held]) for ours, held in parts.items()}
    items = {"model": ForeignItem(MODULE, renamed)}
    if "optimizer" in contents.items:
        named, problems = _by_name(contents, theirs, names)
        if problems:
            return problems
        optimizer, problems = _optimizer(named, theirs, parts, model)
        if problems:
            return problems
        items["optimizer"] = ForeignItem(OPTIMIZER, optimizer)
    for name in contents.items.keys() - items.keys():
        contents.left_out[name] = "the trainer has no such item"
    contents.items = items
    return []


def required_config(source: Foreign, call: ImportCall) -> CannotImport:
    """The error for a checkpoint whose config is not beside it."""
    command = call.again(source.path, "--config", "run.yaml")
    problem = "the config of its run is not beside it, and the shapes do not tell heads, norm and activation"
    return CannotImport(path=source.path, problems=(problem,), remedy=Help(command, "name a config with its model"))


# ---- names ----


def _untied(state: State, names: Names, model: ModelConfig) -> State:
    """Without the output layer's second name of the embedding, which a file may or may not have."""
    head, embedding = f"{names.head}.weight", f"{names.embedding}.weight"
    is_same = head in state and embedding in state and torch.equal(state[head], state[embedding])
    return {key: value for key, value in state.items() if not (model.tie_word_embeddings and is_same and key == head)}


def _parts(names: Names, model: ModelConfig) -> Iterator[tuple[str, tuple[str, ...]]]:
    """For each tensor of ours the tensors of theirs that it is made of, one below the other, in our order."""
    norms = ("weight",) if model.norm == "rmsnorm" else ("weight", "bias")
    yield "embedding.weight", (f"{names.embedding}.weight",)
    for number in range(model.n_layer):
        theirs = names.block.format(number)
        ours = f"blocks.{number}."
        for kind in norms:
            yield f"{ours}attention_norm.{kind}", (f"{theirs}{names.attention_norm}.{kind}",)
        for kind in _kinds(model.has_qkv_bias):
            heads = (names.query, names.key, names.value)
            yield f"{ours}attention.qkv.{kind}", tuple(f"{theirs}{name}.{kind}" for name in heads if name)
        for kind in _kinds(model.has_attn_out_bias):
            yield f"{ours}attention.out.{kind}", (f"{theirs}{names.out}.{kind}",)
        for kind in norms:
            yield f"{ours}mlp_norm.{kind}", (f"{theirs}{names.mlp_norm}.{kind}",)
        for kind in _kinds(model.has_mlp_bias):
            if model.mlp_type == "gated":
                gated = (names.gate, names.up)
                yield f"{ours}mlp.gate_up.{kind}", tuple(f"{theirs}{name}.{kind}" for name in gated if name)
            else:
                yield f"{ours}mlp.up.{kind}", (f"{theirs}{names.plain_up}.{kind}",)
        for kind in _kinds(model.has_mlp_bias):
            down = names.down if model.mlp_type == "gated" else names.plain_down
            yield f"{ours}mlp.down.{kind}", (f"{theirs}{down}.{kind}",)
    for kind in norms:
        yield f"norm.{kind}", (f"{names.norm}.{kind}",)
    if not model.tie_word_embeddings:
        yield "head.weight", (f"{names.head}.weight",)


def _kinds(has_bias: bool) -> tuple[str, ...]:
    return ("weight", "bias") if has_bias else ("weight",)


def _misfits(theirs: State, parts: Mapping[str, tuple[str, ...]], names: Names, model: ModelConfig) -> list[str]:
    """Every tensor that is missing, not expected, or of another shape than the config says."""
    known = {name for held in parts.values() for name in held}
    problems = [f"{name}: missing; the config needs it" for name in sorted(known - theirs.keys())]
    problems += [f"{name}: not part of the configured model" for name in sorted(theirs.keys() - known)]
    embedding = theirs.get(f"{names.embedding}.weight")
    if problems or embedding is None:
        return problems
    with torch.device("meta"):
        wanted = GPT(model, len(embedding)).state_dict()
    for ours, held in parts.items():
        found = [tuple(theirs[name].shape) for name in held]
        rows = sum(shape[0] for shape in found if shape)
        if (rows, *found[0][1:]) != tuple(wanted[ours].shape) or any(each[1:] != found[0][1:] for each in found):
            said = ", ".join(f"{name} {list(shape)}" for name, shape in zip(held, found, strict=True))
            problems.append(f"{said}: the config needs {list(wanted[ours].shape)} for {ours}")
    if model.vocab_size is not None and model.vocab_size != len(embedding):
        problems.append(f"model.vocab_size: {model.vocab_size} in the config, {len(embedding)} rows in the checkpoint")
    return problems


def _joined(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Tensors one below the other, in fp32, in which our trainer keeps weights; halves fit into it exactly."""
    whole = tensors[0] if len(tensors) == 1 else torch.cat(tensors)
    return whole.float() if whole.dtype in (torch.bfloat16, torch.float16) else whole


# ---- the optimizer ----


def _optimizer(
    state: State, theirs: State, parts: Mapping[str, tuple[str, ...]], model: ModelConfig
) -> tuple[State, list[str]]:
    """An AdamW state under our names, in our two groups, matrices and others; or what does not fit."""
    moments: dict[str, State] = {}
    problems: list[str] = []
    for ours, held in parts.items():
        kept = [state["state"].get(name, {}) for name in held]
        if not any(kept):
            continue
        if any(each.keys() != {"step", "exp_avg", "exp_avg_sq"} for each in kept):
            problems.append(f"optimizer: {held[0]} has {', '.join(kept[0]) or 'nothing'}, AdamW needs its two moments")
        elif any(each["exp_avg"].shape != theirs[name].shape for name, each in zip(held, kept, strict=True)):
            problems.append(f"optimizer: the moments of {', '.join(held)} have other shapes than the weights")
        elif len({float(each["step"]) for each in kept}) > 1:
            problems.append(f"optimizer: {', '.join(held)} were updated in different steps")
        else:
            keys = ("exp_avg", "exp_avg_sq")
            moments[ours] = {"step": kept[0]["step"].clone(), **{key: _joined([e[key] for e in kept]) for key in keys}}
    with torch.device("meta"):
        live = GPT(model, len(theirs[next(iter(parts.values()))[0]]))
    shapes = {name: parameter.ndim for name, parameter in live.named_parameters()}
    ours_by_group = [[n for n, ndim in shapes.items() if ndim >= 2], [n for n, ndim in shapes.items() if ndim < 2]]
    groups: list[dict[str, Any]] = [
        {**{key: value for key, value in group.items() if key not in ("params", *_OF_SCHEDULERS)}, "params": called}
        for group, called in zip(state["param_groups"], ours_by_group, strict=True)
    ]
    return {"state": moments, "param_groups": groups}, problems


def _by_name(contents: Contents, theirs: State, names: Names) -> tuple[State, list[str]]:
    """The optimizer's state by their parameter names, if its groups are matrices and others; or what does not fit.

    Numbers follow the order in which the model registers its parameters. A pickled model has it, safetensors and DCP
    sort their names: with those it has to be known.
    """
    item = contents.items["optimizer"]
    order = list(theirs)
    if names is LLAMA:
        order.sort(key=_llama_order)
    elif item.kind == NUMBERED and not contents.has_order:
        return {}, ["optimizer: its parameters are numbered, and the files do not tell their order; use --item model"]
    matrices = [name for name in order if theirs[name].ndim >= 2]
    others = [name for name in order if theirs[name].ndim < 2]
    groups = [group["params"] for group in item.state["param_groups"]]
    if [len(group) for group in groups] != [len(matrices), len(others)]:
        counts = " and ".join(str(len(group)) for group in groups)
        return {}, [f"optimizer: groups of {counts} parameters are not matrices and others; use --item model"]
    if item.kind == NUMBERED:
        numbers = dict(zip([*groups[0], *groups[1]], [*matrices, *others], strict=True))
        return {**item.state, "state": {numbers[number]: kept for number, kept in item.state["state"].items()}}, []
    if [set(group) for group in groups] != [set(matrices), set(others)]:
        return {}, ["optimizer: its groups are not matrices and others; use --item model"]
    return item.state, []


def _llama_order(name: str) -> tuple[int, int, int]:
    """Where a Llama of Transformers registers a parameter: within a layer attention, MLP, then the two norms."""
    before, _, kind = name.rpartition(".")
    layer = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", before)
    if layer is None:
        return {LLAMA.embedding: 0, LLAMA.norm: 2, LLAMA.head: 3}.get(before, 4), 0, 0
    inner = (LLAMA.query, LLAMA.key, LLAMA.value, LLAMA.out, LLAMA.gate, LLAMA.up, LLAMA.down)
    held = (*inner, LLAMA.attention_norm, LLAMA.mlp_norm)
    # A weight comes before its bias.
    return 1, int(layer[1]), 2 * held.index(layer[2]) + (kind != "weight") if layer[2] in held else 0
