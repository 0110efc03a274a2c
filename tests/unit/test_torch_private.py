"""Private names of torch stand in one module, and what they say is tried out before it is believed."""

import ast
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import unbroken
from unbroken import torch_private
from unbroken.exact.sums import SumBuffers

PACKAGE = Path(unbroken.__file__).parent
# The dicts of ``nn.Module``, which modules of every version have and which others read too.
MODULE_DICTS = {"_modules", "_buffers", "_non_persistent_buffers_set"}
# Private names of other packages: Python's own, numpy's, and those of loaders that torchdata and others make.
ELSEWHERE = {"_replace", "_getframe", "_exit", "_rand", "_bit_generator"}
OF_PROCESSES = {"_target", "_args", "_start_method", "_popen"}
OF_LOADERS = {"_make_state_dict", "_DATASET_STATE", "_initial_iter_for_state_dict", "_num_iter_calls"}
# Those of the module that ``worker_signals`` has looked at.
OF_WORKERS = {"_error_if_any_worker_fails", "_set_worker_signal_handlers"}
# The lists of what was prepared: Accelerate has no other way to ask.
OF_ACCELERATORS = {"_models", "_dataloaders", "_custom_objects"}
# Where a Trainer adds up the metrics of an epoch: without them the mean of an interrupted one is of its last batches.
OF_TRAINERS = {"_results", "_first_loop_iter"}
# Modules about what other packages have: the private names that they spell are not torch's.
ABOUT_OTHERS = ("foreign/", "frameworks/", "trackers/", "gpt/huggingface.py", "state/grain_data.py")
ABOUT_OTHERS += ("state/hugging_face.py", "state/loaders.py", "state/pipelines.py", "state/torchdata_nodes.py")
ABOUT_OTHERS += ("state/wrappers.py",)
# Spelled as strings: a public part of torch's format, Python's own, this package's, and those of other loaders.
SPELLED = {"_extra_state", "_register_atexit", "_mapped", "_iterator", "_loader", "_num_iter_calls"}
ALLOWED = MODULE_DICTS | ELSEWHERE | OF_PROCESSES | OF_LOADERS | OF_WORKERS | OF_ACCELERATORS | OF_TRAINERS


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def breaches(tree: ast.AST, own: set[str]) -> Iterator[str]:
    """Private names of torch that a module imports or reads; ``own`` are those that the package defines itself."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            for alias in node.names:
                path = [*module.split("."), *alias.name.split(".")]
                if "torch" in path and any(map(is_private, path)):
                    yield f"line {node.lineno}: import of {'.'.join(path)}"
        elif isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in own | ALLOWED:
            yield f"line {node.lineno}: {ast.unparse(node)}"


def parts_of_texts(node: ast.AST) -> Iterator[ast.AST]:
    """The strings in it that are no names of attributes."""
    if isinstance(node, ast.JoinedStr):
        yield from node.values
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        yield from node.args if node.func.attr in ("endswith", "removesuffix") else ()
    elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__slots__":
        yield from ast.walk(node.value)


def spelled(tree: ast.AST) -> Iterator[str]:
    """Private names that a module has as strings, to ask for an attribute by; parts of longer texts are none."""
    parts = {id(part) for node in ast.walk(tree) for part in parts_of_texts(node)}
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Constant) and isinstance(node.value, str)) or id(node) in parts:
            continue
        name = node.value
        # A class in quotes is a type that is defined further below.
        if name.isidentifier() and is_private(name) and name.strip("_")[:1].islower() and name not in SPELLED:
            yield f"line {node.lineno}: {name!r}"


def defined(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            yield node.attr


def test_no_other_module_uses_a_private_name_of_torch() -> None:
    trees = {path: ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py") if path.name != "torch_private.py"}
    own = {name for tree in trees.values() for name in defined(tree)}
    found = [f"{path.relative_to(PACKAGE)} {each}" for path, tree in trees.items() for each in breaches(tree, own)]
    assert not found


def test_no_other_module_has_a_private_name_of_torch_as_a_string() -> None:
    found = [
        f"{path} {each}"
        for path, name in ((path, path.relative_to(PACKAGE).as_posix()) for path in PACKAGE.rglob("*.py"))
        if name != "torch_private.py" and not name.startswith(ABOUT_OTHERS)
        for each in spelled(ast.parse(path.read_text()))
    ]
    assert not found


@pytest.mark.parametrize(
    "line",
    [
        "from torch._subclasses.fake_tensor import FakeTensorMode",
        "from torch.distributed.checkpoint.filesystem import _StorageInfo",
        "import torch.utils.data._utils",
        "torch._C._storage_Use_Count(1)",
        "module._get_fsdp_state()",
    ],
)
def test_a_private_name_elsewhere_is_noticed(line: str) -> None:
    assert list(breaches(ast.parse(line), set()))


def test_a_private_name_in_a_string_is_noticed() -> None:
    assert list(spelled(ast.parse("hasattr(optimizer, '_optimizer_step_pre_hooks')")))
    assert not list(spelled(ast.parse("f'{name}_steps'")))


# ---- holders of memory ----


@pytest.fixture
def fresh_probe() -> Iterator[None]:
    torch_private.lone_holders.cache_clear()
    yield
    torch_private.lone_holders.cache_clear()


@pytest.mark.usefixtures("fresh_probe")
def test_memory_is_reused_only_without_any_reference_to_it() -> None:
    buffers = SumBuffers()
    lent = buffers.take(8, torch.float32, torch.device("cpu"))
    assert torch_private.lone_holders() is not None, "this torch counts holders in a way that cannot be relied on"
    assert not buffers.is_seen(lent)
    kinds: list[Callable[[], object]] = [
        lambda: lent[2:3],
        lent.detach,
        lent.numpy,
        lent.untyped_storage,
        lambda: torch.nn.Parameter(lent),
    ]
    for hold in kinds:
        held = hold()
        assert buffers.is_seen(lent)
        del held
        assert not buffers.is_seen(lent)


LIES: dict[str, Callable[[int], int] | None] = {
    "always one": lambda _: 1,
    "always many": lambda _: 99,
    "missing": None,
}


@pytest.mark.usefixtures("fresh_probe")
@pytest.mark.parametrize("lie", LIES)
def test_an_unverified_count_is_not_trusted(lie: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_private, "_use_count", LIES[lie])
    buffers = SumBuffers()
    lent = buffers.take(8, torch.float32, torch.device("cpu"))
    assert buffers.is_seen(lent), "then it is given away, and the next sum gets new memory"


@pytest.mark.usefixtures("fresh_probe")
def test_a_count_that_never_goes_down_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = iter(range(1, 1000))
    monkeypatch.setattr(torch_private, "_use_count", lambda _: next(counts))
    assert torch_private.lone_holders() is None


def test_compiling_is_watched_until_it_is_no_longer() -> None:
    seen: list[str] = []
    stop = torch_private.watch_compiling(lambda: seen.append("begins"), lambda: seen.append("ends"))
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
    stop()
    assert seen == ["begins", "ends"]
    torch.compile(lambda x: x - 1, backend="eager")(torch.ones(2))
    assert seen == ["begins", "ends"]
