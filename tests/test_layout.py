"""Rules of the source tree: which module may import which, and which constructs are forbidden."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parent.parent / "src" / "cedd"

# A module may import those before it, and itself.
ORDER = (
    "names",
    "splitmix",
    "parts",
    "storage",
    "device",
    "row_sums",
    "quadrature",
    "schedules",
    "clocks",
    "process",
    "parameterization",
    "network",
    "block_layout",
    "constraints",
    "objectives",
    "dynamics",
    "methods",
    "losses",
    "bounds",
    "samplers",
    "theory",
    "data",
    "models",
    "training",
    "evaluation",
    "spelling",
    "tasks",
    "apps",
    "cli",
)
# __init__ collects the public names and __main__ starts the command line: both may import everything.
ROOT_FILES = {"__init__", "__main__"}

UNPICKLERS = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
LOADERS = {"torch.load", "torch.serialization.load"}
EVALUATORS = {"eval", "exec"}

# Optional packages: a test file that needs one of these uses pytest.importorskip.
OPTIONAL = {"mkdocs", "playwright", "tensorboard", "starlette", "uvicorn", "httpx", "hatchling"}
OPTIONAL |= {"transformers", "triton", "datasets", "gguf", "lm_eval", "openai", "pygls", "lsprotocol"}


def source_files() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def part_of(path: Path) -> str:
    """The entry of ORDER (or of ROOT_FILES) that a file belongs to."""
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


@cache
def nodes(source: str) -> dict[type[ast.AST], list[ast.AST]]:
    """All AST nodes of a source, by type; they are cached, so tests must not modify them."""
    found: dict[type[ast.AST], list[ast.AST]] = {}
    for node in ast.walk(ast.parse(source)):
        found.setdefault(type(node), []).append(node)
    return found


def imported_modules(source: str, package: tuple[str, ...]) -> Iterator[str]:
    """Dotted names of everything imported anywhere in the source; `package` resolves relative imports."""
    for node in (*nodes(source).get(ast.Import, ()), *nodes(source).get(ast.ImportFrom, ())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            prefix = (*base, *(node.module.split(".") if node.module else ()))
            yield from (".".join((*prefix, alias.name)) for alias in node.names)


def wrong_imports(source: str, part: str, package: tuple[str, ...] = ("cedd",)) -> list[str]:
    """Imports of cedd's own parts that come later in ORDER."""
    allowed = ORDER[: ORDER.index(part) + 1]
    wrong: list[str] = []
    for name in imported_modules(source, package):
        names = name.split(".")
        if names[0] != "cedd":
            continue
        imported = names[1] if len(names) > 1 else ""
        # The root imports every part, so only the command line, the last of them, may import it.
        is_root = imported not in ORDER
        if (is_root and part != "cli") or (not is_root and imported not in allowed):
            wrong.append(name)
    return wrong


def imports_of_modules(sources: dict[tuple[str, ...], Path]) -> dict[str, set[str]]:
    """Each module, by its dotted name, with the modules that it imports anywhere in its text."""
    modules = {".".join(names).removesuffix(".__init__") for names in sources}
    graph: dict[str, set[str]] = {}
    for names, path in sources.items():
        imported = set(imported_modules(path.read_text("utf-8"), names[:-1]))
        imported |= {name.rpartition(".")[0] for name in imported - modules}  # a name inside a module
        graph[".".join(names).removesuffix(".__init__")] = imported & modules
    return graph


def dangerous_uses(source: str) -> list[str]:
    """Anything that could run code from a file: unpickling, torch.load, eval and exec of strings."""
    found = [
        name for name in imported_modules(source, ("cedd",)) if name == "torch.load" or name.split(".")[0] in UNPICKLERS
    ]
    for kind in (ast.Attribute, ast.Call, ast.keyword):
        for node in nodes(source).get(kind, ()):
            match node:
                case ast.Attribute(attr="load") if ast.unparse(node) in LOADERS:
                    found.append(ast.unparse(node))
                case ast.Call(func=ast.Name(id=name)) if name in EVALUATORS:
                    found.append(ast.unparse(node))
                case ast.keyword(arg="allow_pickle") if ast.unparse(node) != "allow_pickle=False":
                    found.append(ast.unparse(node))
    return found


def test_every_module_is_in_import_order_list() -> None:
    assert {part_of(path) for path in source_files()} <= {*ORDER, *ROOT_FILES}


def test_imports_follow_module_order() -> None:
    wrong = {
        str(path.relative_to(SOURCE)): names
        for path in source_files()
        if part_of(path) in ORDER
        and (
            names := wrong_imports(
                path.read_text("utf-8"), part_of(path), ("cedd", *path.relative_to(SOURCE).parent.parts)
            )
        )
    }
    assert not wrong


def test_no_circular_imports() -> None:
    sources = {("cedd", *path.relative_to(SOURCE).with_suffix("").parts): path for path in source_files()}
    TopologicalSorter(imports_of_modules(sources)).prepare()


def test_circular_import_is_detected(tmp_path: Path) -> None:
    sources = {("cedd", name): tmp_path / f"{name}.py" for name in ("a", "b")}
    sources["cedd", "a"].write_text("from cedd import b", "utf-8")
    sources["cedd", "b"].write_text("def late():\n    from cedd.a import something", "utf-8")
    with pytest.raises(CycleError):
        TopologicalSorter(imports_of_modules(sources)).prepare()


def test_source_has_no_unpickling_or_eval() -> None:
    wrong = {
        str(path.relative_to(SOURCE)): uses
        for path in source_files()
        if (uses := dangerous_uses(path.read_text("utf-8")))
    }
    assert not wrong


def test_only_cli_filters_warnings_globally() -> None:
    """`cli` may; elsewhere filters are inside `with warnings.catch_warnings()`."""
    calls = {"filterwarnings", "simplefilter"}

    def found(tree: ast.AST) -> set[int]:
        return {node.lineno for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr in calls}

    wrong: dict[str, set[int]] = {}
    for path in source_files():
        source = path.read_text("utf-8")
        if part_of(path) != "cli" and any(call in source for call in calls):
            blocks = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.With)]
            inside = [found(one) for one in blocks if "catch_warnings" in ast.unparse(one.items[0])]
            if lines := found(ast.parse(source)).difference(*inside):
                wrong[str(path.relative_to(SOURCE))] = lines
    assert not wrong


def test_no_utils_module() -> None:
    assert not [path for path in source_files() if "utils" in path.relative_to(SOURCE).with_suffix("").parts]


def test_class_names_are_unique() -> None:
    """Private ones included, without their underscore."""
    places: dict[str, list[str]] = {}
    for path in source_files():
        for node in ast.parse(path.read_text("utf-8")).body:
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name.strip("_"), []).append(str(path.relative_to(SOURCE)))
    assert not {name: found for name, found in places.items() if len(found) > 1}


def top_level_imports(source: str) -> set[str]:
    """The packages imported at the top level of a file, that is, in unindented lines."""
    return set(re.findall(r"^(?:from|import) (\w+)", source, re.MULTILINE))


def test_optional_packages_are_not_imported_at_top_level_of_tests() -> None:
    """`pytest -m gpu` collects every file, also on a machine without the documentation builder."""
    files = sorted(Path(__file__).parent.rglob("*.py"))
    assert not {path.name: found for path in files if (found := top_level_imports(path.read_text("utf-8")) & OPTIONAL)}
    assert top_level_imports("from mkdocs.config import load_config\ndef late():\n    import uvicorn") == {"mkdocs"}


@pytest.mark.slow
def test_collection_succeeds_without_optional_packages() -> None:
    script = f"import sys, pytest; sys.modules.update(dict.fromkeys({sorted(OPTIONAL)})); "
    script += "sys.exit(pytest.main(['--collect-only', '-qq', '-m', '', '-p', 'no:cacheprovider', 'tests']))"
    done = subprocess.run([sys.executable, "-c", script], cwd=SOURCE.parents[1], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:]


def test_package_has_py_typed_marker() -> None:
    assert (SOURCE / "py.typed").is_file()


@pytest.mark.parametrize(
    ("source", "part", "package"),
    [
        ("import cedd.models", "process", ("cedd",)),
        ("from cedd.bounds import estimator", "objectives", ("cedd", "objectives")),
        ("from cedd import models", "samplers", ("cedd", "samplers")),
        ("from cedd import __version__", "training", ("cedd", "training")),
        ("from . import process", "schedules", ("cedd",)),
        ("from ..models import transformer", "bounds", ("cedd", "bounds")),
        ("def late():\n    from cedd.cli import main", "data", ("cedd", "data")),
    ],
)
def test_upward_import_is_detected(source: str, part: str, package: tuple[str, ...]) -> None:
    assert wrong_imports(source, part, package)


@pytest.mark.parametrize(
    ("source", "part", "package"),
    [
        ("import torch", "schedules", ("cedd",)),
        ("from cedd.process import TokenProcess", "parameterization", ("cedd",)),
        ("from .integrand import integrand", "bounds", ("cedd", "bounds")),
        ("import cedd.models.transformer", "training", ("cedd", "training")),
        ("from cedd import __version__", "cli", ("cedd", "cli")),
    ],
)
def test_downward_import_is_accepted(source: str, part: str, package: tuple[str, ...]) -> None:
    assert not wrong_imports(source, part, package)


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import torch\ntorch.load('x')",
        "from torch import load",
        "eval('1')",
        "exec('1')",
        "import numpy\nnumpy.load('x', allow_pickle=True)",
    ],
)
def test_dangerous_use_is_detected(source: str) -> None:
    assert dangerous_uses(source)


def test_model_eval_is_not_flagged_as_dangerous() -> None:
    assert not dangerous_uses("model.eval()\nnumpy.load('x', allow_pickle=False)")


def test_contributing_lists_modules_in_import_order():
    table = (SOURCE.parent.parent / "CONTRIBUTING.md").read_text("utf-8").partition("| module | contents |")[2]
    assert tuple(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == ORDER
