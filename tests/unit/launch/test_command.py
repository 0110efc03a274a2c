"""What a launch starts: command line and environment."""

from pathlib import Path

import pytest

from unbroken.errors import BadUsage, ModuleMissing, PathMissing
from unbroken.launch.command import (
    Shape,
    Target,
    command_of,
    environment_of,
    require_shape,
    require_target,
    sets_threads,
    target_of,
)
from unbroken.launch.torchrun import Nodes, Rendezvous, is_endpoint, launcher_text, parse_nodes, stopping_options

ONE, TWO = Nodes(1, 1), Nodes(2, 2)
MEETING = Rendezvous("n0:29500")
SCRIPT = Target("train.py", ("--lr", "1"))


def command(shape: Shape, target: Target = SCRIPT) -> list[str]:
    return command_of(target, shape, python="py", torchrun_options=["--known"])


def environment(shape: Shape, **before: str) -> dict[str, str]:
    return environment_of(before, shape, outcome_path=Path("/t/o.json"), shutdown_timeout_s=9, free_port=4242)


def test_words_name_a_script_or_a_module() -> None:
    assert target_of("unbroken run", None, ("train.py", "-m", "x")) == Target("train.py", ("-m", "x"))
    assert target_of("unbroken run", "pkg.train", ("--lr", "1")) == Target("pkg.train", ("--lr", "1"), is_module=True)
    assert target_of("unbroken run", None, ("-m", "pkg.train", "a")) == Target("pkg.train", ("a",), is_module=True)


@pytest.mark.parametrize("words", [(), ("-m",)])
def test_naming_nothing_is_refused(words: tuple[str, ...]) -> None:
    with pytest.raises(BadUsage):
        target_of("unbroken run", None, words)


def test_one_process_is_started_directly() -> None:
    assert command(Shape()) == ["py", "-u", "train.py", "--lr", "1"]
    assert command(Shape(1), Target("pkg", is_module=True)) == ["py", "-u", "-m", "pkg"]


def test_several_processes_are_started_by_torchrun_without_its_restarts() -> None:
    front = ["py", "-m", "unbroken.launch.agent", "--nproc-per-node", "4", "--max-restarts", "0", "--known"]
    assert command(Shape(4)) == [*front, "--standalone", "train.py", "--lr", "1"]


def test_other_nodes_are_named_to_torchrun() -> None:
    rendezvous = ["--nnodes", "2", "--node-rank", "1", "--master-addr", "n0", "--master-port", "29500"]
    assert command(Shape(None, TWO, 1, "n0", 29500))[-len(rendezvous) - 3 : -3] == rendezvous
    assert "1" in command(Shape(None, TWO, 1, "n0"))[4:5]


@pytest.mark.parametrize("word", ["gpu", "cpu", "auto"])
def test_a_word_is_left_to_torchrun_to_count(word: str) -> None:
    assert command(Shape(word))[3:5] == ["--nproc-per-node", word]
    assert not sets_threads({}, Shape(word))


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        (Shape(1, TWO), "--node-rank and --master-addr"),
        (Shape(1, TWO, 0), "--master-addr"),
        (Shape(1, TWO, 2, "n0"), "0 to 1"),
        (Shape(1, ONE, 1, "n0"), "0 to 0"),
        (Shape(1, Nodes(1, 2)), "--rdzv-endpoint HOST:PORT"),
        (Shape(1, TWO, 1, None, 80, MEETING), "--node-rank and --master-port cannot be used with"),
    ],
)
def test_options_about_nodes_that_do_not_fit_are_refused(shape: Shape, said: str) -> None:
    with pytest.raises(BadUsage, match=said):
        require_shape("unbroken run", shape)


def test_options_about_nodes_that_fit_pass() -> None:
    require_shape("unbroken run", Shape())
    require_shape("unbroken run", Shape(8, TWO, 1, "n0"))
    require_shape("unbroken run", Shape(8, Nodes(1, 2), rendezvous=MEETING))


def test_a_plain_process_gets_no_rank_and_a_counted_one_gets_torchruns_variables() -> None:
    assert environment(Shape(), A="b") == {"A": "b", "UNBROKEN_OUTCOME_FILE": "/t/o.json"}
    counted = environment(Shape(1))
    assert counted["RANK"] == counted["LOCAL_RANK"] == "0"
    assert counted["WORLD_SIZE"] == counted["LOCAL_WORLD_SIZE"] == "1"
    assert (counted["MASTER_ADDR"], counted["MASTER_PORT"]) == ("127.0.0.1", "4242")


def test_each_of_several_processes_gets_one_thread_unless_set_otherwise() -> None:
    assert environment(Shape(2))["OMP_NUM_THREADS"] == "1"
    assert environment(Shape(2), OMP_NUM_THREADS="8")["OMP_NUM_THREADS"] == "8"
    assert "OMP_NUM_THREADS" not in environment(Shape(1))
    assert environment(Shape(2))["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] == "9"


def test_agents_that_meet_restart_by_themselves_and_look_for_no_key_of_an_earlier_world() -> None:
    shape = Shape(4, Nodes(1, 2), rendezvous=Rendezvous("n0:29500", "mine", "last_call_timeout=5"))
    words = command_of(SCRIPT, shape, python="py", torchrun_options=[], torchrun_restarts=7)
    assert words[3:7] == ["--nproc-per-node", "4", "--max-restarts", "7"]
    rendezvous = ["--nnodes", "1:2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "n0:29500", "--rdzv-id", "mine"]
    assert words[7:] == [*rendezvous, "--rdzv-conf", "last_call_timeout=5", "train.py", "--lr", "1"]
    assert environment(shape)["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE" not in environment(Shape(4))
    assert command_of(SCRIPT, Shape(4), python="py", torchrun_options=[], torchrun_restarts=7)[6] == "0"


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]"])
def test_agents_of_one_machine_do_not_need_its_name(host: str) -> None:
    assert Rendezvous(f"{host}:80").options(TWO)[-2:] == ["--local-addr", "127.0.0.1"]


def test_numbers_of_nodes_and_endpoints_are_read_or_refused() -> None:
    assert (parse_nodes("2"), parse_nodes("1:4")) == (Nodes(2, 2), Nodes(1, 4))
    assert {parse_nodes(text) for text in ("0", "0:2", "3:2", "a", "1:2:3", "", "-1", "1:", "\u0662")} == {None}
    assert is_endpoint("n0:29500") and is_endpoint("[fe80::1]:1") and is_endpoint("10.0.0.1:65535")
    assert not any(map(is_endpoint, ("n0", "n0:", ":80", "n0:0", "n0:65536", "http://n0:80", "n 0:80")))


def test_a_program_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(PathMissing):
        require_target("unbroken run", SCRIPT, tmp_path)
    (tmp_path / "train.py").mkdir()
    with pytest.raises(BadUsage, match="__main__"):
        require_target("unbroken run", SCRIPT, tmp_path)


def test_a_module_is_found_without_importing_its_package(tmp_path: Path) -> None:
    (tmp_path / "package_of_a_test").mkdir()
    (tmp_path / "package_of_a_test" / "__init__.py").write_text("raise RuntimeError('imported')")
    (tmp_path / "package_of_a_test" / "train.py").write_text("")
    require_target("unbroken run", Target("package_of_a_test.train", is_module=True), tmp_path)
    require_target("unbroken run", Target("json.tool", is_module=True), tmp_path)
    for name in ("package_of_a_test.trian", "package_of_a_test.train.x", "no_such_package", ".", "a..b"):
        with pytest.raises(ModuleMissing):
            require_target("unbroken run", Target(name, is_module=True), tmp_path)


def test_this_torchrun_takes_the_options_and_another_one_is_not_given_what_it_lacks() -> None:
    options = stopping_options(launcher_text(), 90)
    assert options == [
        "--signals-to-handle",
        "SIGTERM,SIGHUP,SIGQUIT,SIGUSR1,SIGUSR2",
        "--shutdown-timeout",
        "90",
    ]
    assert stopping_options("an older launcher", 90) == []
