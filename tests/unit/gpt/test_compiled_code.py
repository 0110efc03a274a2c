"""Compiled code that is kept for the next job: what is used, and what never is."""

import gzip
import hashlib
import io
import os
import shutil
import subprocess
import sys
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.exact.gpt_world import tiny
from tests.torch_versions import torch_is_older
from unbroken.config import Config
from unbroken.exact.self_tested import make_key
from unbroken.gpt.compiled_code import VARIABLE, CompiledCode, compiled_code, is_private

CPU = torch.device("cpu")


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path / "tmp"))
    return tiny(tmp_path / "data", tmp_path / "run", compile=True)


def found(config: Config, tmp_path: Path, **environ: str) -> CompiledCode | None:
    return compiled_code(config, 384, CPU, None, {"XDG_CACHE_HOME": str(tmp_path / "cache"), **environ})


def compile_into(code: CompiledCode, name: str = "ab/kernel.so") -> Path:
    path = code.live / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"compiled")
    return path


def test_a_node_that_lost_its_code_finds_it_again(config: Config, tmp_path: Path) -> None:
    first = found(config, tmp_path)
    assert first is not None
    kernel = compile_into(first)
    compile_into(first, "locks/held.lock")
    first.keep()
    kernel.unlink()
    again = found(config, tmp_path)
    assert again is not None and again.kept == first.kept
    again.unpack()
    assert kernel.read_bytes() == b"compiled"
    # Nothing new: nothing is written.
    before = again.kept.stat().st_mtime_ns
    again.keep()
    assert again.kept.stat().st_mtime_ns == before


def test_code_of_another_shape_processor_or_torch_is_another_file(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def name(config: Config = config) -> str:
        code = found(config, tmp_path)
        assert code is not None
        return code.kept.name

    names = [name(), name(replace(config, model=replace(config.model, n_embd=64)))]
    for changed in ({"cpu": "another"}, {"torch": "9.9"}):
        key = {**make_key(CPU), **changed}
        monkeypatch.setattr("unbroken.gpt.compiled_code.make_key", lambda _, key=key: key)
        names.append(name())
    assert len(set(names)) == 4


@pytest.mark.parametrize("mode", [0o770, 0o707])
@pytest.mark.parametrize("which", ["cache/unbroken/compiled", f"tmp/unbroken-compiled-{os.getuid()}"])
def test_a_folder_that_others_write_into_is_not_used(config: Config, tmp_path: Path, mode: int, which: str) -> None:
    assert found(config, tmp_path) is not None
    (tmp_path / which).chmod(mode)
    assert found(config, tmp_path) is None


def test_a_folder_of_another_user_or_a_link_is_not_used(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = found(config, tmp_path)
    assert code is not None and is_private(code.kept.parent)
    (tmp_path / "link").symlink_to(code.kept.parent)
    assert not is_private(tmp_path / "link")
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert not is_private(code.kept.parent)


def test_a_directory_that_the_user_chose_stays(config: Config, tmp_path: Path) -> None:
    assert found(config, tmp_path, **{VARIABLE: "/scratch/mine"}) is None
    # Torch names its own as soon as it is loaded, and an earlier job of this process named ours.
    assert found(config, tmp_path, **{VARIABLE: str(tmp_path / "tmp" / "torchinductor_me")}) is not None
    code = found(config, tmp_path)
    assert code is not None and found(config, tmp_path, **{VARIABLE: str(code.live)}) is not None
    assert found(replace(config, training=replace(config.training, compile=False)), tmp_path) is None


@pytest.mark.parametrize("damage", ["cut", "flipped", "other content", "empty"])
def test_a_damaged_file_is_as_none(config: Config, tmp_path: Path, damage: str) -> None:
    code = found(config, tmp_path)
    assert code is not None
    kernel = compile_into(code)
    code.keep()
    data = code.kept.read_bytes()
    other = gzip.compress(gzip.decompress(data[32:]).replace(b"compiled", b"computed"))
    damaged = {
        "cut": data[:50],
        "flipped": data[:-5] + bytes([data[-5] ^ 1]) + data[-4:],
        "other content": data[:32] + other,
        "empty": b"",
    }
    code.kept.write_bytes(damaged[damage])
    kernel.unlink()
    code.unpack()
    assert not kernel.exists()


def test_no_name_leads_out_of_the_directory(config: Config, tmp_path: Path) -> None:
    code = found(config, tmp_path)
    assert code is not None
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name in ("../out", f"{tmp_path}/other/out", "a/../../out", "in"):
            member = tarfile.TarInfo(name)
            archive.addfile(member)
    body = gzip.compress(packed.getvalue())
    code.kept.write_bytes(hashlib.sha256(body).digest() + body)
    code.unpack()
    assert [path.name for path in tmp_path.rglob("*out")] == []
    assert (code.live / "in").exists() and not (tmp_path / "other").exists()


def test_only_the_newest_files_are_kept(config: Config, tmp_path: Path) -> None:
    for width in range(2, 24, 2):
        code = found(replace(config, model=replace(config.model, n_embd=width)), tmp_path)
        assert code is not None
        compile_into(code)
        code.keep()
    assert len(list((tmp_path / "cache/unbroken/compiled").iterdir())) == 8


# Compiles a function, forward and backward, as a job does, and says what torch found.
JOB = """
import os, sys
from pathlib import Path
from unbroken.gpt.compiled_code import VARIABLE, CompiledCode
code = CompiledCode(*map(Path, sys.argv[1:]))
code.unpack()
os.environ[VARIABLE] = str(code.live)
import torch
from torch._dynamo.utils import counters
sines = torch.compile(lambda x: (x.sin() * 2).sum(dim=-1))
sines(torch.ones(64, 64, requires_grad=True)).sum().backward()
code.keep()
print(counters["inductor"]["fxgraph_cache_hit"], counters["inductor"]["fxgraph_cache_miss"])
"""


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch compiles with g++")
@pytest.mark.skipif(torch_is_older(2, 13), reason="older versions of torch count otherwise")
def test_torch_compiles_nothing_on_a_node_that_lost_its_code(tmp_path: Path) -> None:
    live, kept = tmp_path / "live", tmp_path / "kept" / "code.tar.gz"
    kept.parent.mkdir(mode=0o700)
    # Precompiled headers would take most of the time of this test.
    environ = {**os.environ, "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0", "OMP_NUM_THREADS": "1"}
    said = []
    for _ in range(2):
        shutil.rmtree(live, ignore_errors=True)
        command = [sys.executable, "-c", JOB, str(live), str(kept)]
        said.append(subprocess.run(command, env=environ, check=True, capture_output=True, text=True).stdout.split())
    assert said == [["0", "2"], ["2", "0"]]
