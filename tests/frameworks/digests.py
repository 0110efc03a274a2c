"""What the state of a training is made of, as texts that are equal only if every bit is."""

import torch


def flat(at: str, value: object) -> list[tuple[str, str]]:
    """Every value in nested dicts and lists, each with its place."""
    if isinstance(value, dict):
        return [each for key, inner in value.items() for each in flat(f"{at}.{key}", inner)]
    if isinstance(value, list):
        return [each for place, inner in enumerate(value) for each in flat(f"{at}.{place}", inner)]
    return [(at, value.numpy().tobytes().hex() if isinstance(value, torch.Tensor) else repr(value))]
