"""AdamW as the trainer uses it: weight decay on matrices only, its rate set before each step."""

from torch import nn

from unbroken.config.optimizer import OptimizerConfig
from unbroken.gpt.adamw import AdamW


def make_optimizer(model: nn.Module, config: OptimizerConfig) -> AdamW:
    """The optimizer of a model, which may be sharded; its rate is set before each step."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in parameters if parameter.ndim >= 2]
    others = [parameter for parameter in parameters if parameter.ndim < 2]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
    return AdamW(groups, lr=config.learning_rate, betas=(config.beta1, config.beta2), eps=config.eps)


def follow(optimizer: AdamW, config: OptimizerConfig) -> None:
    """Take what may change between two jobs from here: a checkpoint brings its own options back.

    Those of the config are a person's choice. The kernel is ours, whichever optimizer wrote the checkpoint, and counts
    its steps on the host.
    """
    matrices, others = optimizer.param_groups
    for group in (matrices, others):
        group.update(betas=(config.beta1, config.beta2), eps=config.eps, fused=False, foreach=True)
    matrices["weight_decay"] = config.weight_decay
    for state in optimizer.state.values():
        state["step"] = state["step"].cpu()


def set_rate(optimizer: AdamW, rate: float) -> None:
    """The learning rate of the next step."""
    for group in optimizer.param_groups:
        group["lr"] = rate
