"""AdamW as the trainer makes it: what decays, which kernel runs, what a person may change."""

from unbroken.config import ModelConfig, OptimizerConfig
from unbroken.gpt.model import GPT
from unbroken.gpt.optimizer import AdamW, follow, make_optimizer, set_rate

MODEL = ModelConfig(vocab_size=16, n_embd=8, n_layer=1, n_head=2, n_positions=8, use_bias=True)


def made(**options: object) -> tuple[GPT, AdamW]:
    model = GPT(MODEL)
    return model, make_optimizer(model, OptimizerConfig(**options))  # type: ignore[arg-type]


def test_matrices_decay_and_nothing_else_does() -> None:
    model, optimizer = made(weight_decay=0.3)
    decaying, others = optimizer.param_groups
    assert (decaying["weight_decay"], others["weight_decay"]) == (0.3, 0.0)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert {names[id(p)].rpartition(".")[2] for p in decaying["params"]} == {"weight"}
    assert all("norm" in names[id(p)] or names[id(p)].endswith("bias") for p in others["params"])
    assert len(decaying["params"]) + len(others["params"]) == len(names)


def test_on_a_cpu_it_is_the_kernel_whose_bits_do_not_depend_on_the_shard() -> None:
    _, optimizer = made()
    assert all(group["foreach"] and not group["fused"] for group in optimizer.param_groups)


def test_a_checkpoint_of_another_device_does_not_bring_its_kernel_along() -> None:
    _, optimizer = made()
    for group in optimizer.param_groups:
        # As a checkpoint of a GPU gives it back.
        group.update(fused=True, foreach=False)
    follow(optimizer, OptimizerConfig())
    assert [(group["fused"], group["foreach"]) for group in optimizer.param_groups] == [(False, True)] * 2


def test_the_rate_is_set_for_all_and_changed_options_are_followed() -> None:
    _, optimizer = made()
    set_rate(optimizer, 0.125)
    follow(optimizer, OptimizerConfig(weight_decay=0.5, beta1=0.8, beta2=0.9, eps=1e-6))
    assert [group["lr"] for group in optimizer.param_groups] == [0.125, 0.125]
    assert [group["betas"] for group in optimizer.param_groups] == [(0.8, 0.9)] * 2
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.5, 0.0]
    assert {group["eps"] for group in optimizer.param_groups} == {1e-6}
