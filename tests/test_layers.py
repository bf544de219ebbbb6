"""Imports point down: past any number of floors, never up, never sideways.

The floors are those drawn in docs/explanation/architecture.md, in the block that begins with ```floors: one floor
a line, top first. The drawing is the table; there is no second one to keep in step.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import unlearnd

PACKAGE = Path(unlearnd.__file__).parent
ROOT = Path(__file__).parent.parent
DRAWING = ROOT / "docs" / "explanation" / "architecture.md"
# Alembic runs the migrations from inside the ledger, and they ask it for its tables: they are one thing.
PART_OF = {"migrations": "ledger"}


def read_floors() -> dict[str, int]:
    """Return how high each module is: 0 for the bottom floor."""
    drawn = re.search(r"^```floors\n(.*?)^```", DRAWING.read_text(), re.M | re.S)
    assert drawn, f"{DRAWING} draws no floors"
    names = [line.split() for line in drawn[1].strip().splitlines()]
    floors = {name: height for height, floor in enumerate(reversed(names)) for name in floor}
    assert len(floors) == sum(map(len, names)), "a module is drawn twice"
    return floors


FLOORS = read_floors()
MODULES = sorted(path.relative_to(PACKAGE.parent) for path in PACKAGE.rglob("*.py"))


def part_of(module: str) -> str:
    """Return what of the drawing a dotted module name below `unlearnd` belongs to; nothing for the map itself."""
    name = module.split(".")[1] if "." in module else ""
    return PART_OF.get(name, name)


def imports_of(path: Path) -> Iterator[tuple[str, int]]:
    """Yield what a file imports from `unlearnd`, with line numbers; imports for types alone do not count."""
    tree = ast.parse((PACKAGE.parent / path).read_text())
    skipped = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
        for statement in node.body
        for inner in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names if alias.name.split(".")[0] == "unlearnd")
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are written out in full"
            if node.module == "unlearnd":
                # `from unlearnd import errors` is the module; `from unlearnd import __version__` is the map.
                yield from ((f"unlearnd.{alias.name}", node.lineno) for alias in node.names if is_module(alias.name))
            elif node.module and node.module.startswith("unlearnd."):
                yield node.module, node.lineno


def is_module(name: str) -> bool:
    return (PACKAGE / f"{name}.py").exists() or (PACKAGE / name / "__init__.py").exists()


def dotted(path: Path) -> str:
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


def test_every_module_is_on_exactly_one_floor_and_every_name_drawn_is_a_module() -> None:
    there = {part_of(dotted(path)) for path in MODULES} - {""}
    assert there == set(FLOORS)


@pytest.mark.parametrize("path", MODULES, ids=dotted)
def test_imports_point_down(path: Path) -> None:
    here = part_of(dotted(path))
    if not here:
        return  # `unlearnd/__init__.py` is a map: it names what is promised, wherever that lives
    wrong = [
        f"{path}:{line}: {here} imports {module}"
        for module, line in imports_of(path)
        if part_of(module) != here and not FLOORS[part_of(module)] < FLOORS[here]
    ]
    assert wrong == []


def test_the_map_imports_only_the_bottom_floor_until_something_is_called() -> None:
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    top = [node.module for node in tree.body if isinstance(node, ast.ImportFrom)]
    assert {part_of(module) for module in top if module and module.startswith("unlearnd.")} <= {
        name for name, height in FLOORS.items() if height == 0
    }


PLUGIN_FILES = sorted((ROOT / "plugins").rglob("*.py"))
SHIPPED = [PACKAGE.parent / path for path in MODULES] + [p for p in PLUGIN_FILES if "tests" not in p.parts]


def names_used(path: Path) -> set[str]:
    """Return every module imported and every dotted name or call option used in a file."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute):
            found.add(ast.unparse(node))
        elif isinstance(node, ast.keyword) and node.arg == "shell":
            found.add(f"shell={ast.unparse(node.value)}")
        elif isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            found.add(f"allow_pickle={ast.unparse(node.value)}")
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("eval", "exec"):
            found.add(node.func.id)
    return found


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_shipped_unpickles_or_starts_a_shell(path: Path) -> None:
    forbidden = {
        *("pickle", "cPickle", "dill", "joblib", "cloudpickle", "shelve", "marshal"),
        *("torch.load", "torch.save", "os.system", "os.popen", "shell=True", "allow_pickle=True", "eval", "exec"),
    }
    used = names_used(path)
    assert used & forbidden == set()
    assert {name.split(".")[0] for name in used} & {"pickle", "dill", "shelve", "marshal"} == set()


@pytest.mark.parametrize("path", MODULES, ids=dotted)
def test_core_never_imports_torch(path: Path) -> None:
    assert "torch" not in {name.split(".")[0] for name in names_used(PACKAGE.parent / path)}


@pytest.mark.parametrize("path", MODULES, ids=dotted)
def test_only_the_ledger_knows_sql_and_only_storage_writes_bytes(path: Path) -> None:
    used = {name.split(".")[0] for name in names_used(PACKAGE.parent / path)}
    if part_of(dotted(path)) != "ledger":
        assert used & {"sqlalchemy", "sqlmodel", "sqlite3", "alembic"} == set()
    if part_of(dotted(path)) not in ("storage", "sources"):
        assert "fsspec" not in used


@pytest.mark.parametrize("path", MODULES, ids=dotted)
def test_only_keys_and_names_are_drawn_at_random(path: Path) -> None:
    # Replaying a slice must give the same bytes. `storage` and `leases` draw throw-away names, nothing that is trained.
    used = names_used(PACKAGE.parent / path)
    if part_of(dotted(path)) not in ("keys", "storage", "leases"):
        assert "secrets" not in {name.split(".")[0] for name in used}
    assert {"random", "numpy.random", "np.random.seed", "os.urandom"} & used == set()
