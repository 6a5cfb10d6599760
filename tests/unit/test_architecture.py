"""The shape of the package: imports go down only, and everything is small, named and documented."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

import mongo_celery

ROOT = Path(mongo_celery.__file__).parent
FUNCTION_LINES_MAX = 60
VAGUE_NAMES = {"utils", "util", "helpers", "helper", "common", "misc", "models", "types", "base"}
DJANGOS_NAMES = {"contrib.django.models"}
"""Where Django looks for things."""

FLOORS = (
    {"errors"},
    {
        *("arguments", "command_line", "quantities", "visible", "findings", "app", "forking", "exits", "periodic"),
        *("mongo", "broker", "embedded", "tracing", "plan"),
    },
    {"locking", "twophase"},
    {"outbox"},
    {"bridge"},
    {"cli", "contrib", "testing", ""},
    {"demo", "bench"},
)
"""The ground floor first. A name is a module or a package of the first level; the empty one is the package itself."""

PURE = (
    "errors",
    "arguments",
    "mongo.identity",
    "bridge.raw_event",
    "bridge.options",
    "bridge.fenced.fence",
    "bridge.worker.envelope",
    "bridge.window",
    "bridge.listener.fairness",
    "bridge.partitioning",
)
"""What must run without a client, Celery, threads or a clock."""


@dataclass(frozen=True)
class Import:
    """One import of a module of ours by another."""

    importer: str
    imported: str
    line: int
    typing_only: bool

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.imported}"


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def first_part(module: str) -> str:
    return module.partition(".")[0]


def second_part(module: str) -> str:
    return module.split(".")[1] if "." in module else module


def floor_of(module: str) -> int:
    return next((floor for floor, names in enumerate(FLOORS) if first_part(module) in names), len(FLOORS))


MODULES = {name_of(path): path for path in sorted(ROOT.rglob("*.py"))}


@cache
def trees() -> dict[str, ast.Module]:
    return {module: ast.parse(path.read_text(encoding="utf-8")) for module, path in MODULES.items()}


def imported_names(node: ast.AST) -> Iterator[str]:
    """Full names of modules, a submodule in `from package import submodule` included."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, "relative imports hide where a module stands"
        module = node.module or ""
        for alias in node.names:
            whole = f"{module}.{alias.name}"
            yield whole if whole.removeprefix("mongo_celery.") in trees() else module


def imports_of(importer: str, tree: ast.Module) -> Iterator[Import]:
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
        for statement in node.body
        for inner in ast.walk(statement)
    }
    for node in ast.walk(tree):
        for name in imported_names(node):
            if name == "mongo_celery" or name.startswith("mongo_celery."):
                imported = name.removeprefix("mongo_celery").removeprefix(".")
                yield Import(importer, imported, getattr(node, "lineno", 0), id(node) in typing_only)


@cache
def imports() -> tuple[Import, ...]:
    return tuple(each for name, tree in trees().items() for each in imports_of(name, tree))


def goes_down(each: Import) -> bool:
    return floor_of(each.imported) <= floor_of(each.importer)


def cycle_in(edges: dict[str, set[str]]) -> list[str] | None:
    """A cycle of a graph, or None: depth first, with the path that leads to each node."""
    finished: set[str] = set()

    def visit(node: str, path: list[str]) -> list[str] | None:
        if node in path:
            return [*path[path.index(node) :], node]
        if node in finished:
            return None
        for following in sorted(edges.get(node, ())):
            found = visit(following, [*path, node])
            if found:
                return found
        finished.add(node)
        return None

    return next((found for node in sorted(edges) if (found := visit(node, []))), None)


def edges_of(found: tuple[Import, ...]) -> dict[str, set[str]]:
    """Imports by module."""
    edges: dict[str, set[str]] = {}
    for each in found:
        edges.setdefault(each.importer, set()).add(each.imported)
    return edges


def rooms(edges: dict[str, set[str]], room_of: Callable[[str], str]) -> dict[str, set[str]]:
    """The same between rooms."""
    found: dict[str, set[str]] = {}
    for importer, imported in edges.items():
        found.setdefault(room_of(importer), set()).update(map(room_of, imported))
    return {room: others - {room} for room, others in found.items()}


def test_every_module_stands_on_one_floor() -> None:
    """A new module is placed on purpose: whoever adds one says what may use it."""
    placed = [name for names in FLOORS for name in names]
    assert len(placed) == len(set(placed))
    assert {first_part(module) for module in trees()} <= set(placed)


def test_nothing_is_named_from_below() -> None:
    """A floor knows nothing of those above it, neither at run time, nor inside functions, nor in annotations."""
    upward = [str(each) for each in imports() if not goes_down(each)]
    assert not upward, "\n".join(upward)


def test_no_modules_form_a_cycle() -> None:
    """Inside a package too, where floors say nothing; modules that name each other in annotations are one module."""
    assert cycle_in(edges_of(imports())) is None


def test_no_rooms_form_a_cycle() -> None:
    """Rooms on one floor may use each other, in one direction."""
    assert cycle_in(rooms(edges_of(imports()), first_part)) is None


def test_no_rooms_of_the_bridge_form_a_cycle() -> None:
    """The bridge is a house of its own: its parts are handed the wiring, which stands between them."""
    within = {
        importer: {name for name in imported if first_part(name) == "bridge"}
        for importer, imported in edges_of(imports()).items()
        if first_part(importer) == "bridge"
    }
    assert cycle_in(rooms(within, second_part)) is None


def test_only_the_package_itself_names_the_bridge() -> None:
    """The facade stands above all its parts, and commands act on the wiring."""
    assert {each.importer for each in imports() if each.imported == "bridge.bridge"} == {""}


def test_the_search_for_cycles_finds_one() -> None:
    """A checker that has never failed has not been tested."""
    assert cycle_in({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert cycle_in({"a": {"b", "c"}, "b": {"c"}}) is None


@pytest.mark.parametrize("module", PURE)
def test_the_pure_modules_know_neither_celery_nor_clients_nor_threads_nor_clocks(module: str) -> None:
    """P10: what decides without a clock of its own cannot judge an expiry by it."""
    for node in ast.walk(trees()[module]):
        found = set(imported_names(node))
        assert not {first_part(name) for name in found} & {"celery", "kombu", "pymongo", "redis", "threading", "time"}


def long_functions(module: str, tree: ast.Module) -> Iterator[str]:
    """Functions with too many lines; docstrings do not count."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[1:] if ast.get_docstring(node) else node.body
            count = (node.end_lineno or node.lineno) - body[0].lineno + 1 if body else 0
            if count > FUNCTION_LINES_MAX:
                yield f"{module}.{node.name} has {count} lines"


def test_no_function_is_long() -> None:
    """The loop, the commands and the constructors included."""
    assert [each for module, tree in trees().items() for each in long_functions(module, tree)] == []
    assert list(long_functions("m", ast.parse("async def f():" + "\n    await g()" * 61))) == ["m.f has 61 lines"]


def test_no_module_has_a_name_that_says_nothing() -> None:
    """Such modules grow without a purpose."""
    assert [module for module in MODULES if set(module.split(".")) & VAGUE_NAMES] == sorted(DJANGOS_NAMES)


def undocumented(scope: ast.Module | ast.ClassDef, name: str) -> Iterator[str]:
    """Public names without a docstring; a name with an underscore and what it contains is private."""
    if not ast.get_docstring(scope):
        yield name
    for node in scope.body:
        if isinstance(node, ast.If):
            continue  # declarations for the type checker
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from undocumented(node, f"{name}.{node.name}")
        if (
            isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            and not node.name.startswith("_")
            and not ast.get_docstring(node)
        ):
            yield f"{name}.{node.name}"


def test_every_public_name_has_a_docstring() -> None:
    """What does it do, and what does it not promise?"""
    assert [each for module, tree in trees().items() for each in undocumented(tree, module or "mongo_celery")] == []
    found = undocumented(ast.parse("class C:\n    async def f(self): ...\n    def _g(self): ..."), "m")
    assert list(found) == ["m", "m.C", "m.C.f"]


def meanings_of_classes(found: dict[str, ast.Module]) -> dict[str, list[str]]:
    """Where a class name is defined, private ones and those inside functions included."""
    meanings: dict[str, list[str]] = {}
    for module, tree in found.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                meanings.setdefault(node.name, []).append(module)
    return meanings


def meanings_of_modules(found: dict[str, ast.Module]) -> dict[str, list[str]]:
    """Modules and packages by feature and last name; a module named as its own package is what the package is of."""
    meanings: dict[str, list[str]] = {}
    for module in found:
        *packages, name = module.split(".")
        if packages and packages[-1] != name:
            meanings.setdefault(f"{packages[0]}: {name}", []).append(module)
    return meanings


def ambiguous(meanings: dict[str, list[str]]) -> dict[str, list[str]]:
    return {name: modules for name, modules in meanings.items() if len(modules) > 1}


def test_no_module_or_class_name_has_two_meanings() -> None:
    """One word for one thing: of a class in the whole package, of a module inside its feature; nobody is excepted."""
    assert ambiguous(meanings_of_classes(trees())) | ambiguous(meanings_of_modules(trees())) == {}


def test_the_search_for_ambiguous_names_finds_them() -> None:
    """A checker that has never failed has not been tested."""
    one, other = ast.parse("class Claim: ..."), ast.parse("def make():\n    class Claim: ...")
    assert ambiguous(meanings_of_classes({"outbox.once": one, "bridge.state.claims": other})) == {
        "Claim": ["outbox.once", "bridge.state.claims"],
    }
    names = ("bridge", "bridge.bridge", "bridge.state", "bridge.state.claims", "bridge.worker.claims", "outbox.claims")
    assert ambiguous(meanings_of_modules(dict.fromkeys(names, one))) == {
        "bridge: claims": ["bridge.state.claims", "bridge.worker.claims"],
    }


def test_every_file_that_is_no_module_is_packed() -> None:
    """A page fails that asks for a static file which the wheel lacks; a slow test builds the wheel itself."""
    project = tomllib.loads((ROOT.parent / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = project["tool"]["setuptools"]["package-data"]["mongo_celery"]
    packed = {found for pattern in patterns for found in ROOT.glob(pattern)}
    others = {each for each in ROOT.rglob("*") if each.is_file() and each.suffix not in {".py", ".pyc"}}
    assert others == packed
