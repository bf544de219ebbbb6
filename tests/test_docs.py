"""The documentation does what it says, and leaves nothing out.

Every shell and Python block of the README, the tutorial and the how-to guides is run as it is written, page by
page and in order, in an empty folder; what a console block shows as printed must be printed. An HTML comment right
above a block says what is special about it:

    <!-- exit: 1 -->                the block is meant to end with this code
    <!-- file: NAME -->             the block is a file that the reader saves under this name
    <!-- installs: FOLDER -->       `pip install` of that folder; the test makes its entry points known instead
    <!-- not run: REASON -->        skipped, for a reason that a reader would accept

The README and the tutorial are read with the command `unlearnd` as it is installed, the how-to guides with one that
starts quicker (`tests/warm.py`) and is the same otherwise.

The pages below `docs/reference/` are held against the code: what they do not name, they are missing.
"""

import inspect
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click
import pytest

from unlearnd import errors, hookspecs
from unlearnd.cli import main
from unlearnd.config import _SECTIONS
from unlearnd.default_plugins.linear import LinearSettings
from unlearnd.ledger import tables
from unlearnd.serving import ServedModel
from unlearnd.store import Store
from unlearnd.testing import BackendContract

ROOT = Path(__file__).parent.parent
REFERENCE = ROOT / "docs" / "reference"
PAGES = sorted(
    [ROOT / "README.md", *(ROOT / "docs" / "tutorial").glob("*.md"), *(ROOT / "docs" / "how-to").glob("*.md")]
)
MARKDOWN = sorted(
    path
    for path in ROOT.rglob("*.md")
    if not any(part.startswith(".") or part == "node_modules" for part in path.relative_to(ROOT).parts)
)
RUN = {"sh", "console", "python"}

_BLOCK = re.compile(r"^```([\w+-]*)[^\n]*\n(.*?)^```\s*$", re.M | re.S)
_NOTE = re.compile(r"<!-- (exit|file|installs|not run): (.+?) -->\s*\Z")
_LINK = re.compile(r"(?<!\\)\[[^\]]*\]\(([^)\s]+)\)|<img[^>]*\ssrc=\"([^\"]+)\"")


@dataclass(frozen=True)
class Block:
    line: int
    language: str
    text: str
    note: tuple[str, str] | None


def blocks_of(page: Path) -> Iterator[Block]:
    text = page.read_text()
    for found in _BLOCK.finditer(text):
        note = _NOTE.search(text[: found.start()])
        noted = (note[1], note[2]) if note else None
        yield Block(text.count("\n", 0, found.start()) + 1, found[1], found[2], noted)


def prose_of(page: Path) -> str:
    return _BLOCK.sub("", page.read_text())


def commands_in(block: Block) -> str:
    """Return what a reader would type: of a console, the lines behind `$ ` and their continuations."""
    if block.language == "sh":
        return block.text
    typed = [line[2:] for line in block.text.splitlines() if line.startswith(("$ ", "> "))]
    assert typed, "a console block without a line that begins with `$ `"
    return "\n".join(typed) + "\n"


def output_in(block: Block) -> list[str]:
    """Return the lines that a console block shows as having been printed."""
    lines = block.text.splitlines() if block.language == "console" else []
    return [line for line in lines if line and not line.startswith(("$ ", "> "))]


class Reader:
    """Somebody who follows a page from top to bottom: folder and exported variables stay between blocks."""

    def __init__(self, home: Path) -> None:
        self._home = home / "reader"
        self._home.mkdir()
        self._site = home / "site"
        self._site.mkdir()
        self._state = home / "state.sh"
        self._state.write_text(f"cd '{self._home}'\n")
        # Not `sys.executable`'s target: the folder of the environment that this test runs in.
        self._environment = {
            **{name: value for name, value in os.environ.items() if name != "UNLEARND_STORE"},
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(self._site),
            "PYTHONSAFEPATH": "",
        }

    def knows(self, *, PATH: str = "", **variables: str) -> None:
        """Add to the reader's environment, and to where commands are found."""
        self._environment |= variables
        self._environment["PATH"] += f"{os.pathsep}{PATH}" if PATH else ""

    def starts_quickly(self, python: list[str]) -> None:
        """Give the reader a command `unlearnd` in front of the installed one that runs it by another `python`."""
        installed = Path(sys.executable).parent / "unlearnd"
        quick = self._site.with_name("bin") / "unlearnd"
        quick.parent.mkdir()
        quick.write_text(f'#!/bin/sh\nexec {shlex.join([*python, str(installed)])} "$@"\n')
        quick.chmod(0o700)
        self._environment["PATH"] = f"{quick.parent}{os.pathsep}{self._environment['PATH']}"

    def follow(self, block: Block) -> None:
        kind, value = block.note or ("", "")
        if kind == "file":
            path = self._folder() / value
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text)
        elif kind == "installs":
            self._install(self._folder() / value)
        elif kind != "not run":
            self._run(block, int(value) if kind == "exit" else 0)

    def _run(self, block: Block, expected: int) -> None:
        keep = f'trap \'{{ printf "cd %q\\n" "$PWD"; export -p; }} > "{self._state}"\' EXIT\n'
        typed = f"python - <<'END_OF_BLOCK'\n{block.text}END_OF_BLOCK\n" if block.language == "python" else ""
        script = f". '{self._state}'\n{keep}set -euo pipefail\n{typed or commands_in(block)}"
        ended = subprocess.run(
            ["bash", "-c", script], env=self._environment, capture_output=True, text=True, timeout=120, check=False
        )
        said = f"\n{typed or commands_in(block)}\n--- output\n{ended.stdout}{ended.stderr}"
        assert ended.returncode == expected, f"line {block.line}: exit code {ended.returncode}, not {expected}{said}"
        assert "Traceback" not in ended.stderr, f"line {block.line}: a traceback{said}"
        missing = set(output_in(block)) - {*ended.stdout.splitlines(), *ended.stderr.splitlines()}
        assert not missing, f"line {block.line}: not said: {missing}{said}"

    def _folder(self) -> Path:
        where = subprocess.run(
            ["bash", "-c", f". '{self._state}'; pwd"], capture_output=True, text=True, check=True, env=self._environment
        )
        return Path(where.stdout.strip())

    def _install(self, folder: Path) -> None:
        """Do what `pip install -e` does, without pip: put the folder on the path and its entry points next to it."""
        project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
        about = self._site / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
        )
        lines = [
            line
            for group, entries in project["entry-points"].items()
            for line in (f"[{group}]", *(f"{name} = {value}" for name, value in entries.items()))
        ]
        (about / "entry_points.txt").write_text("\n".join(lines) + "\n")
        for module in folder.glob("*.py"):
            (self._site / module.name).write_text(module.read_text())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_example_on_a_page_runs_as_written(page, tmp_path, request):
    reader = Reader(tmp_path)
    if page.parent.name == "how-to":
        torch = "torch" in page.read_text()
        reader.starts_quickly(request.getfixturevalue("warm_with_torch" if torch else "warm"))
    if "postgresql+psycopg:" in page.read_text():
        # Somebody who is on the server, and whom it lets in.
        server = request.getfixturevalue("postgres")
        reader.knows(PGHOST=server.socket, PGUSER="postgres", PATH=str(server.handle.bin_path))
    for block in blocks_of(page):
        if block.language in RUN or block.note:
            reader.follow(block)


def test_only_what_needs_git_or_make_is_left_out():
    for page in PAGES:
        for block in blocks_of(page):
            if block.note and block.note[0] == "not run" and block.language in RUN:
                assert re.search(r"\b(git clone|make)\b", block.text), f"{page.name}, line {block.line}"


def sections_of(page: Path) -> dict[str, str]:
    """Return the text of each `## ` section by its heading, without backticks."""
    parts = re.split(r"^## (.+)$", page.read_text(), flags=re.M)
    return {heading.replace("`", ""): text for heading, text in zip(parts[1::2], parts[2::2], strict=True)}


def commands_below(group: click.Group, prefix: str) -> Iterator[tuple[str, click.Command]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from commands_below(command, f"{prefix} {name}")
        yield f"{prefix} {name}", command


@pytest.mark.parametrize(("name", "command"), list(commands_below(main, "unlearnd")), ids=lambda value: str(value))
def test_every_command_is_described_with_all_its_options(name, command):
    sections = sections_of(REFERENCE / "commands.md")
    assert name in sections, f"`{name}` has no section in commands.md"
    described = set(re.findall(r"`(-{1,2}[\w-]+)", sections[name]))
    options = {
        max(option.opts, key=len) for option in command.params if isinstance(option, click.Option) and not option.hidden
    }
    assert options <= described, f"`{name}`: {', '.join(sorted(options - described))} not described"
    assert described <= options | {"-o", "--help", "-h"}, f"`{name}`: {', '.join(sorted(described - options))} is gone"


def test_the_reference_describes_no_command_that_is_not_there():
    described = {name for name in sections_of(REFERENCE / "commands.md") if name.startswith("unlearnd ")}
    assert described == {name for name, _ in commands_below(main, "unlearnd")}


def test_every_hook_is_described():
    hooks = {name for name, value in vars(hookspecs).items() if hasattr(value, "unlearnd_spec")}
    assert hooks
    assert hooks <= named_in("hooks.md")


def test_every_role_a_plugin_may_play_is_described_with_its_members():
    text = (REFERENCE / "hooks.md").read_text()
    roles = [
        value for value in vars(hookspecs).values() if inspect.isclass(value) and value.__module__ == hookspecs.__name__
    ]
    for role in roles:
        assert f"`{role.__name__}`" in text, role.__name__
        members = {*inspect.get_annotations(role), *(name for name in vars(role) if not name.startswith("_"))}
        for member in members:
            assert re.search(rf"`{member}\b", text), f"{role.__name__}.{member}"


def test_every_error_is_described():
    kinds = {name for name, value in vars(errors).items() if inspect.isclass(value) and issubclass(value, Exception)}
    assert kinds <= named_in("errors.md")


@pytest.mark.parametrize("backend", ["linear", "mlp"])
def test_every_setting_of_a_backend_is_described(backend):
    if backend == "linear":
        fields = LinearSettings.model_fields
    else:
        fields = pytest.importorskip("unlearnd_torch.settings").MlpSettings.model_fields
    assert settings_in(f"Settings of the backend {backend}") == set(fields)


@pytest.mark.parametrize("backend", ["sgd", "forest"])
def test_every_setting_of_a_backend_of_scikit_learn_is_described(backend):
    settings = pytest.importorskip("unlearnd_sklearn.settings")
    fields = {"sgd": settings.SgdSettings, "forest": settings.ForestSettings}[backend].model_fields
    assert settings_in(f"Settings of the backend {backend}") == set(fields)


def test_every_parameter_and_method_of_the_estimator_is_described():
    estimator = pytest.importorskip("unlearnd_sklearn").SisaClassifier
    text = (ROOT / "plugins" / "unlearnd-sklearn" / "README.md").read_text()
    methods = {name for name in vars(estimator) if not name.startswith(("_", "set_"))}
    for name in {*inspect.signature(estimator).parameters, *methods}:
        assert re.search(rf"`{name}[`(]", text), name


@pytest.mark.parametrize("backend", ["convnet", "resnet", "wide_resnet"])
def test_every_setting_of_a_network_is_described(backend):
    settings = pytest.importorskip("unlearnd_torch.settings")
    common = settings_in("Settings of the networks for images")
    assert common == set(settings.ImageSettings.model_fields)
    assert common | settings_in(f"Settings of the backend {backend}") == set(settings.NETWORKS[backend].model_fields)


def test_every_setting_of_the_executor_ray_is_described():
    fields = pytest.importorskip("unlearnd_ray.settings").RaySettings.model_fields
    assert settings_in("Settings of the executor ray") == set(fields)


def settings_in(section: str) -> set[str]:
    """Return the settings that a section of the settings page has rows for."""
    rows = re.findall(r"^\| (`.+?) +\|", sections_of(REFERENCE / "settings.md")[section], re.M)
    return {name for row in rows for name in re.findall(r"`(\w+)`", row)}


def test_every_rule_and_every_fixture_of_the_contract_is_described():
    members = {name for name in vars(BackendContract) if not name.startswith("_")}
    assert members <= named_in("testing.md")


def test_the_template_to_copy_is_what_the_how_to_makes():
    made = {
        block.note[1].replace("mine", "example"): block.text.replace("Mine", "Example").replace("mine", "example")
        for block in blocks_of(ROOT / "docs" / "how-to" / "write-a-backend.md")
        if block.note and block.note[0] == "file"
    }
    for name in ("unlearnd_example.py", "pyproject.toml", "tests/test_contract.py"):
        assert made[f"unlearnd-example/{name}"] == (ROOT / "plugins" / "unlearnd-example" / name).read_text()


def test_every_entry_of_the_settings_file_is_described():
    entries = {name for entries in _SECTIONS.values() for name in entries}
    assert entries <= named_in("settings.md")


def test_every_method_of_a_store_and_of_a_model_is_described():
    methods = {
        name
        for kind in (Store, ServedModel)
        for name, value in vars(kind).items()
        if not name.startswith("_") and (callable(value) or isinstance(value, property | classmethod))
    }
    text = (REFERENCE / "python.md").read_text()
    missing = {name for name in methods if not re.search(rf"`(\w+\.)*{name}\b", text)}
    assert not missing


def test_every_table_is_described():
    rows = [row for name, row in vars(tables).items() if name.endswith("Row")]
    names = {row.__tablename__ for row in rows}
    assert names
    assert names <= named_in("store-layout.md")


def named_in(page: str) -> set[str]:
    """Return all that a page of the reference names in backticks."""
    return set(re.findall(r"`(\w+)[`(]", (REFERENCE / page).read_text()))


@pytest.mark.parametrize("page", MARKDOWN, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_lead_somewhere(page):
    for found in _LINK.finditer(prose_of(page)):
        target = found[1] or found[2]
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), f"{target} leads nowhere"
        if anchor and there.suffix == ".md":
            assert anchor in anchors_of(there), f"{target}: no such heading"


def anchors_of(page: Path) -> set[str]:
    """Return the anchors that GitHub gives to a page's headings."""
    headings = re.findall(r"^#{1,6} (.+)$", prose_of(page), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_page_can_be_reached_from_the_readme():
    reached, waiting = set(), [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        if page not in reached and page.suffix == ".md":
            reached.add(page)
            links = (found[1] or found[2] for found in _LINK.finditer(prose_of(page)))
            waiting.extend((page.parent / link.partition("#")[0]).resolve() for link in links if ":" not in link)
    assert {path for path in MARKDOWN if path.is_relative_to(ROOT / "docs")} <= reached


def test_the_readme_names_the_command_that_ci_runs():
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    called = [line for line in lines if line and not line.startswith(("#", "set ", "cd "))]
    assert len(called) == 1
    shown = {
        line.strip().removeprefix("$ ") for block in blocks_of(ROOT / "README.md") for line in block.text.splitlines()
    }
    assert called[0] in {line.partition("#")[0].strip() for line in shown}


@pytest.mark.parametrize("page", MARKDOWN, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_page_names_somebodys_machine(page):
    assert not re.search(r"/(root|work|home|tmp)/|localhost", page.read_text())
