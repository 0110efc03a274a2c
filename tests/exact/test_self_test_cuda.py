"""The self-test and ``doctor`` on a GPU. Needs a CUDA device, which CI has not."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

PIN = """
import sys, time
import torch
from unbroken import exact
from unbroken.exact import self_tested

torch.cuda.init()
state = torch.cuda.get_rng_state()
started_s = time.monotonic()
exact.pin("cuda")
print(time.monotonic() - started_s)
assert torch.equal(torch.cuda.get_rng_state(), state)
assert {each.verdict for each in self_tested._found["cuda"].combinations} == {"exact"}
exact.Reducer(torch.nn.Linear(2, 2).cuda(), lanes=2, seed=0)
"""


def test_this_gpu_is_exact_and_the_result_serves_the_next_process(tmp_path: Path) -> None:
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "UNBROKEN_SELF_TEST": "on"}
    for _ in range(2):
        print("pin took", subprocess.check_output([sys.executable, "-c", PIN], env=env, text=True))
    assert len(list(tmp_path.rglob("*.json"))) == 1


def test_doctor_names_the_gpu_and_its_driver(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "unbroken", "doctor", str(tmp_path), "--json"]
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    started_s = time.monotonic()
    ended = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    print("doctor took", time.monotonic() - started_s, ended.stdout)
    found = {each["subject"]: each for each in json.loads(ended.stdout)["findings"]}
    assert found["gpu 0"]["values"]["name"] == torch.cuda.get_device_name(0)
    assert found["gpu 0"]["values"]["copy_bytes_per_s"] > 0
    assert {each["verdict"] for each in found["exact"]["values"]["combinations"]} == {"exact"}
