"""Generate docs/api.md: the public surface, from signatures and docstrings.

    python tools/api.py            rewrite the part of docs/api.md below its marker
    python tools/api.py --check    exit 1 if it is stale, or if a public name is not on the page

The head of the page is written by hand. The rest is read from the source without importing it, so the check needs
neither torch nor numpy. What ``LAYOUT`` does not list is not public.
"""

import ast
import re
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "api.md"
MARKER = "<!-- Generated below this line by tools/api.py; do not edit. -->\n"
PACKAGES = ("config", "data", "errors", "exact", "frameworks", "gpt", "testing")
WIDTH = 100
Definition = ast.FunctionDef | ast.ClassDef

# Package, and its names by use. `Name(a, b)` shows only the members a and b; `Name()` shows none.
LAYOUT: dict[str, dict[str, str]] = {
    "unbroken": {
        "Train": "Run Settings",
        "Read checkpoints": "load Loaded checkpoints Checkpoint",
        "Plan saves": "SavePlanner BalanceBytes BalanceTime",
    },
    "unbroken.exact": {"": "pin Reducer Lane Numerics lane_seed"},
    "unbroken.data": {
        "Tokenize": "tokenize_with TokenizeRequest(command) TokenizeOptions TokenizeReport(is_new)",
        "Shards": "open_corpus open_text_corpus seal_shards Corpus Bucket Shard TokenizerIdentity",
        "Batches": "Stream(max_length,end,read) Phase Loader(ended,served) Batch Served",
        "For PyTorch's DataLoader": "SampleDataset SampleIterable",
    },
    "unbroken.gpt": {
        "Train": "train Trained",
        "Generate text": "TextModel Generation() Continued Sampling generate stream",
        "Export": "to_torch to_safetensors to_huggingface",
        "Model": "GPT(forward,extend,new_cache) initialize LossSum",
    },
    "unbroken.frameworks.options": {"": "RunOptions() LoopOptions()"},
    "unbroken.frameworks.accelerate": {
        "": "attach Options() AcceleratorRun(step,epoch,batch,is_stopped,log,save,stop,epochs,batches)"
    },
    "unbroken.frameworks.transformers": {"": "Callback(is_stopped) resume"},
    "unbroken.frameworks.lightning": {"": "Callback Stopped(reason)"},
    "unbroken.frameworks.dcp": {"": "Checkpoints(step,path,is_stopping,step_done,reader,writer,close) Reader Writer()"},
    "unbroken.frameworks.torchtitan": {"": "CheckpointManager(run)"},
    "unbroken.frameworks.deepspeed": {"": "Checkpoints(step,path,is_stopping,load,step_done,save,close)"},
    "unbroken.config": {
        "Read a config": "load from_preset preset PRESETS require_sound Resolved",
        "The config": (
            "Config(value,values,digest,to_json) CurriculumPhase "
            "ModelConfig() DataConfig() OptimizerConfig() TrainingConfig()"
        ),
    },
    "unbroken.testing": {
        "Is a trainer exact?": "assert_exact check_exact Exactness Interruption()",
        "Compare two runs": (
            "compare_runs compare_metrics compare_checkpoints Comparison MetricsComparison StateComparison "
            "FirstDifference is_measured"
        ),
        "Start ranks": "spawn start Ranks Ended logs",
        "Crash a function at every file operation": (
            "crash_points crash_states KILLS ERRORS Trial MemoryDisk() Change() Tail tree"
        ),
        "Make a disk fail": (
            "FaultyDisk() always at at_nth never Plan Operation "
            "Fault Kill() Killed Refuse() Shorten() Ignore() Repeat()"
        ),
    },
}
ERRORS = (
    *("UnbrokenError", "UsageError", "ConfigError", "DataError", "StorageError", "CheckpointError", "ExactnessError"),
    *("BusyError", "TrainingError", "PeerError", "InternalError"),
)
# `Run` calls these on what is registered with it; a loop does not.
PROTOCOL = frozenset({"state_dict", "load_state_dict"})
# Made by the library, never by its user: the constructor is not public.
RESULTS = frozenset({"Lane", "Ranks", "Killed", "AcceleratorRun", "Writer", "Stopped"})
# The seam to the disk, which tests replace: a parameter with this default is not public.
SEAM = "LOCAL"


@dataclass(frozen=True)
class Docstring:
    """A docstring taken apart: paragraphs, and the items of its sections."""

    paragraphs: tuple[str, ...]
    sections: dict[str, dict[str, str]]

    @property
    def summary(self) -> str:
        """The first paragraph."""
        return self.paragraphs[0] if self.paragraphs else ""


# ---- reading the source ----


def source_of(module: str, root: Path = ROOT) -> ast.Module:
    """The syntax tree of a module."""
    path = root / "src" / Path(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(file.read_text(encoding="utf-8"))


def public_names(tree: ast.Module) -> list[str]:
    """The ``__all__`` of a package."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return [str(name) for name in ast.literal_eval(node.value)]
    raise SystemExit("a public package has no __all__")


def homes(tree: ast.Module) -> dict[str, str]:
    """For each name that a package imports, the module it is defined in."""
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
    return {alias.name: str(node.module) for node in imports for alias in node.names}


def definition(module: str, name: str, root: Path = ROOT) -> tuple[ast.stmt, str]:
    """The class, function or constant of a name, and the text below a constant; re-exports are followed.

    Raises:
        KeyError: there is none.
    """
    tree = source_of(module, root)
    for node, after in zip(tree.body, [*tree.body[1:], ast.Pass()], strict=True):
        if isinstance(node, Definition) and node.name == name:
            _borrow_parameters(tree, node)
            _spell_out(module, tree, node, root)
            return node, ""
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if isinstance(target, ast.Name) and target.id == name:
            below = after.value if isinstance(after, ast.Expr) else None
            return node, str(below.value) if isinstance(below, ast.Constant) else ""
    return definition(homes(tree)[name], name, root)


def _borrow_parameters(tree: ast.Module, node: Definition) -> None:
    """Give a function that is declared ``@_called_like(other)`` the parameters of the other."""
    for decorator in node.decorator_list:
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "_called_like":
            name = ast.unparse(decorator.args[0])
            others = [each for each in tree.body if isinstance(each, ast.FunctionDef) and each.name == name]
            if isinstance(node, ast.FunctionDef) and others:
                node.args = others[0].args


def _spell_out(module: str, tree: ast.Module, node: Definition, root: Path) -> None:
    """Replace defaults that are constants of the module, which a reader of the page cannot look up, by their values."""
    for each in ast.walk(node):
        if isinstance(each, ast.arguments):
            each.defaults = [_value_of(module, tree, default, root) for default in each.defaults]
            each.kw_defaults = [default and _value_of(module, tree, default, root) for default in each.kw_defaults]
        elif isinstance(each, ast.AnnAssign) and each.value is not None:
            each.value = _value_of(module, tree, each.value, root)


def _value_of(module: str, tree: ast.Module, default: ast.expr, root: Path) -> ast.expr:
    public = {name for groups in LAYOUT.values() for names in groups.values() for name in wanted(names)}
    if not isinstance(default, ast.Name) or not default.id.isupper() or default.id in {SEAM, *public}:
        return default
    if default.id not in homes(tree) and f"\n{default.id}" not in f"\n{ast.unparse(tree)}":
        return default
    found = definition(module, default.id, root)[0]
    if not isinstance(found, ast.Assign | ast.AnnAssign) or found.value is None:
        return default
    # What the environment decides has a name of its own in the text.
    return default if "environ" in ast.unparse(found.value) else found.value


def parsed(node: ast.AST) -> Docstring:
    """The docstring of a definition, taken apart."""
    text = ast.get_docstring(node) or "" if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module) else ""
    head, *rest = re.split(r"^(Args|Attributes|Raises|Returns):\n", text, flags=re.MULTILINE)
    sections = {title: _items(body) for title, body in zip(rest[::2], rest[1::2], strict=True)}
    return Docstring(tuple(part for part in re.split(r"\n\n(?! )", head.strip()) if part), sections)


def _items(body: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for item in re.split(r"\n(?=\S)", textwrap.dedent(body).strip("\n")):
        name, _, meaning = item.partition(":")
        sentence = markdown(" ".join(meaning.split()))
        found[name.strip()] = sentence[:1].upper() + sentence[1:]
    return found


# ---- writing Markdown ----


def markdown(text: str) -> str:
    """A docstring's prose: code in single backticks, indented blocks fenced."""
    text = re.sub(r"``([^`]+)``", r"`\1`", text)
    lines: list[str] = []
    for paragraph in re.split(r"\n\n", text):
        if paragraph.startswith("    "):
            lines.append(f"```python\n{textwrap.dedent(paragraph)}\n```")
        else:
            lines.append(re.sub(r"::$", ":", paragraph))
    return "\n\n".join(lines)


def in_cell(text: str) -> str:
    """Text in a table: bars are escaped, lines are joined."""
    return " ".join(text.split()).replace("|", r"\|")


def call(name: str, arguments: list[str], returns: str = "") -> str:
    """A signature on one line, or with an argument per line."""
    line = f"{name}({', '.join(arguments)}){returns}"
    if len(line) <= WIDTH:
        return line
    inner = "".join(f"    {argument},\n" for argument in arguments)
    return f"{name}(\n{inner}){returns}"


def constant(name: str, node: ast.expr) -> str:
    """An assignment on one line, or a dict with an entry per line."""
    line = f"{name} = {value(node)}"
    if len(line) <= WIDTH or not isinstance(node, ast.Dict):
        return line
    pairs = (f"    {value(key)}: {value(each)},\n" for key, each in zip(node.keys, node.values, strict=True) if key)
    return f"{name} = {{\n{''.join(pairs)}}}"


def arguments_of(function: ast.FunctionDef, *, is_method: bool = False) -> list[str]:
    """The parameters as written, without ``self``."""
    spec = _without_seam(function.args)
    positional = [*spec.posonlyargs, *spec.args]
    defaults = [None] * (len(positional) - len(spec.defaults)) + list(spec.defaults)
    found = [_argument(each, default) for each, default in zip(positional, defaults, strict=True)]
    if spec.posonlyargs:
        found.insert(len(spec.posonlyargs), "/")
    if spec.vararg is not None:
        found.append(f"*{_argument(spec.vararg, None)}")
    elif spec.kwonlyargs:
        found.append("*")
    found += [_argument(each, default) for each, default in zip(spec.kwonlyargs, spec.kw_defaults, strict=True)]
    if spec.kwarg is not None:
        found.append(f"**{_argument(spec.kwarg, None)}")
    return found[1:] if is_method else found


def _without_seam(spec: ast.arguments) -> ast.arguments:
    # A positional one has a default, and so has all that follows it.
    if any(value(default) == SEAM for default in spec.defaults):
        first = [value(default) == SEAM for default in spec.defaults].index(True)
        at = len(spec.args) - len(spec.defaults) + first
        defaults = [*spec.defaults[:first], *spec.defaults[first + 1 :]]
        return _without_seam(_with(spec, args=[*spec.args[:at], *spec.args[at + 1 :]], defaults=defaults))
    pairs = list(zip(spec.kwonlyargs, spec.kw_defaults, strict=True))
    kept = [(each, default) for each, default in pairs if default is None or value(default) != SEAM]
    return _with(spec, kwonlyargs=[each for each, _ in kept], kw_defaults=[default for _, default in kept])


def _with(spec: ast.arguments, **changes: Any) -> ast.arguments:  # noqa: ANN401 -- lists of several node types
    return ast.arguments(**{name: changes.get(name, getattr(spec, name)) for name in spec._fields})


def _argument(argument: ast.arg, default: ast.expr | None) -> str:
    kind = "" if argument.annotation is None else f": {annotation(argument.annotation)}"
    given = "" if default is None else f" = {value(default)}" if kind else f"={value(default)}"
    return f"{argument.arg}{kind}{given}"


def annotation(node: ast.expr) -> str:
    """A type as written; one in quotes is defined later in its file, and shown without them."""
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else value(node)


def value(node: ast.expr) -> str:
    """An expression as written, with double quotes."""
    return re.sub(r"'([^'\"]*)'", r'"\1"', ast.unparse(node))


def _returns(function: ast.FunctionDef) -> str:
    if function.returns is None or ast.unparse(function.returns) == "None":
        return ""
    return f" -> {annotation(function.returns)}"


def _is_dataclass(node: ast.ClassDef) -> bool:
    return any(ast.unparse(each).startswith("dataclass") for each in node.decorator_list)


def _fields(node: ast.ClassDef) -> Iterator[tuple[str, str, str]]:
    """Name, type and default of a dataclass's public fields."""
    for each in node.body:
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name) and each.target.id[0] != "_":
            default = "" if each.value is None else value(each.value)
            factory = re.fullmatch(r"field\(default_factory=(\w+)\)", default)
            yield each.target.id, annotation(each.annotation), f"{factory[1]}()" if factory else default


# ---- entries ----


def entry(package: str, name: str, node: ast.stmt, members: tuple[str, ...] | None, below: str) -> Iterator[str]:
    """One name of the page; ``below`` is the text below a constant."""
    full = f"{package}.{name}"
    yield f"#### `{full}`\n"
    if isinstance(node, ast.FunctionDef):
        yield f"```python\n{call(full, arguments_of(node), _returns(node))}\n```\n"
        yield from _explained(parsed(node), seams_of(node))
    elif isinstance(node, ast.ClassDef):
        yield from _class(full, node, members)
    elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
        yield f"```python\n{constant(name, node.value)}\n```\n"
        yield f"{markdown(below)}\n"


def _class(full: str, node: ast.ClassDef, members: tuple[str, ...] | None) -> Iterator[str]:
    methods = {each.name: each for each in node.body if isinstance(each, ast.FunctionDef)}
    fields = list(_fields(node)) if _is_dataclass(node) else []
    is_config = any(default.startswith("field(") for _, _, default in fields)
    if not is_config and node.name not in RESULTS and (init := methods.get("__init__")) is not None:
        yield f"```python\n{call(full, arguments_of(init, is_method=True))}\n```\n"
    found = parsed(node)
    attributes = found.sections.pop("Attributes", {})
    yield from _explained(found, seams_of(init) if (init := methods.get("__init__")) else ())
    if is_config:
        yield f"Fields: [config.md](config.md#{node.name.removesuffix('Config').lower()}).\n"
    elif fields:
        yield from _table(fields, attributes)
    elif attributes:
        yield "\n".join(f"- `{name}`: {meaning}" for name, meaning in attributes.items()) + "\n"
    shown = [each for each in methods.values() if _is_shown(each, members)]
    if shown:
        yield "| member | |\n|---|---|"
        yield (
            "\n".join(f"| `{in_cell(_member(each))}` | {in_cell(markdown(parsed(each).summary))} |" for each in shown)
            + "\n"
        )


def _is_shown(method: ast.FunctionDef, members: tuple[str, ...] | None) -> bool:
    if members is not None:
        return method.name in members
    return method.name[0] != "_" and method.name not in PROTOCOL


def _member(method: ast.FunctionDef) -> str:
    if any(ast.unparse(each).endswith("property") for each in method.decorator_list):
        return f"{method.name}{_returns(method).replace(' -> ', ': ')}"
    return f"{method.name}({', '.join(arguments_of(method, is_method=True))}){_returns(method)}"


def _table(fields: list[tuple[str, str, str]], attributes: dict[str, str]) -> Iterator[str]:
    """The fields of a dataclass; the columns that all leave empty are left out."""
    has_default = any(default for _, _, default in fields)
    has_meaning = bool(attributes)
    head = ["field", "type", *(["default"] if has_default else []), *(["meaning"] if has_meaning else [])]
    yield f"| {' | '.join(head)} |\n|{'---|' * len(head)}"
    for name, kind, default in fields:
        cells = [f"`{name}`", f"`{in_cell(kind)}`"]
        cells += [f"`{in_cell(default)}`" if default else ""] if has_default else []
        cells += [in_cell(attributes.get(name, ""))] if has_meaning else []
        yield f"| {' | '.join(cells)} |"
    yield ""


def seams_of(function: ast.FunctionDef) -> tuple[str, ...]:
    """The parameters that are no part of the public surface."""
    spec = function.args
    shown = _without_seam(spec)
    kept = {each.arg for each in (*shown.args, *shown.kwonlyargs)}
    return tuple(each.arg for each in (*spec.args, *spec.kwonlyargs) if each.arg not in kept)


def _explained(found: Docstring, seams: tuple[str, ...]) -> Iterator[str]:
    for paragraph in found.paragraphs:
        yield f"{markdown(paragraph)}\n"
    if arguments := {name: text for name, text in found.sections.get("Args", {}).items() if name not in seams}:
        yield "\n".join(f"- `{name}`: {meaning}" for name, meaning in arguments.items()) + "\n"
    if raises := found.sections.get("Raises"):
        yield f"Raises {', '.join(f'`{name}`' for name in raises)}.\n"


# ---- the page ----


def wanted(names: str) -> dict[str, tuple[str, ...] | None]:
    """The names of a group, each with the members to show; None shows all public ones."""
    found: dict[str, tuple[str, ...] | None] = {}
    for name, members in re.findall(r"(\w+)(\([\w,]*\))?", names):
        found[name] = tuple(each for each in members[1:-1].split(",") if each) if members else None
    return found


def complaints(root: Path = ROOT) -> Iterator[str]:
    """Public names that the page does not list, and names it lists that are not public."""
    for package, groups in LAYOUT.items():
        listed = [name for names in groups.values() for name in wanted(names)]
        public = set(public_names(source_of(package, root))) - {"__version__", *PACKAGES}
        yield from (f"{package}.{name} is public and not in LAYOUT of tools/api.py" for name in public - {*listed})
        yield from (f"{package}.{name} is in LAYOUT of tools/api.py and not public" for name in {*listed} - public)


def generated(root: Path = ROOT) -> str:
    """The part of the page below the marker."""
    parts: list[str] = []
    for package, groups in LAYOUT.items():
        tree = source_of(package, root)
        where = homes(tree)
        parts.append(f"## `{package}`\n")
        parts += [f"{markdown(paragraph)}\n" for paragraph in parsed(tree).paragraphs]
        for title, names in groups.items():
            parts += [f"### {title}\n"] if title else []
            for name, members in wanted(names).items():
                node, below = definition(where.get(name, package), name, root)
                parts += entry(package, name, node, members, below)
    return "\n".join([*parts, *_errors(root)])


def _errors(root: Path) -> Iterator[str]:
    yield "## `unbroken.errors`\n"
    yield "Every error is an `UnbrokenError` and belongs to one of these classes, by what to do about it. `error.kind`"
    yield "names the exact error and does not change; `unbroken explain KIND` explains it.\n"
    yield "| class | exit code | what to do |\n|---|---|---|"
    for name in ERRORS:
        node = definition("unbroken.errors", name, root)[0]
        codes = [
            each.value for each in ast.walk(node) if isinstance(each, ast.Assign) and "exit_code" in ast.unparse(each)
        ]
        yield f"| `{name}` | {ast.unparse(codes[0]) if codes else ''} | {in_cell(markdown(parsed(node).summary))} |"
    yield ""


def main() -> int:
    found = list(complaints())
    head, marker, _ = PAGE.read_text(encoding="utf-8").partition(MARKER)
    if not marker:
        raise SystemExit(f"docs/api.md has no line {MARKER.strip()!r}")
    if not found:
        page = f"{head}{MARKER}\n{generated()}"
        if "--check" not in sys.argv[1:]:
            PAGE.write_text(page, encoding="utf-8")
        elif PAGE.read_text(encoding="utf-8") != page:
            found.append("docs/api.md is stale; python tools/api.py rewrites it")
    print("\n".join(found) if found else "docs/api.md is current")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
