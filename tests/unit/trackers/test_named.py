"""The names of trackers, and what they are not told."""

import pytest

from unbroken.trackers.named import TrackerName, hide_secrets, parse_tracker, trackers_in, without_secrets


def test_a_text_names_several() -> None:
    assert trackers_in(" wandb:a b,tensorboard ,, wandb:a b") == ["wandb:a b", "tensorboard"]
    assert parse_tracker("wandb: a:b ") == TrackerName("wandb", "a:b")
    assert [str(parse_tracker(text)) for text in ("mlflow", "trackio:p")] == ["mlflow", "trackio:p"]
    with pytest.raises(ValueError, match="'comet' is no tracker: wandb, trackio, tensorboard, mlflow"):
        parse_tracker("comet")


def test_names_that_look_like_secrets_are_left_out() -> None:
    secret = {"hub_token": 1, "API_KEY": 2, "apikey": 2, "password": 3, "aws_secret": 4, "inner": {"private_key": 5}}
    plain = {"tokens": 1, "max_tokens": 2, "tokenizer": "t", "pad_token_id": 3, "keep_best": "k", "loss_per_token": 1}
    assert without_secrets({**secret, **plain}) == {"inner": {}, **plain}


def test_a_message_does_not_show_a_secret_of_the_environment() -> None:
    environ = {"WANDB_API_KEY": "abcdef123", "HOME": "/home/me", "MLFLOW_TRACKING_TOKEN": "xyz"}
    said = hide_secrets("401 for abcdef123 of /home/me at xyz", environ)
    assert said == "401 for *** of /home/me at xyz"
