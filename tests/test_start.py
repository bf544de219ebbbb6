"""What a fresh interpreter loads: help is quick, and nobody pays for torch who does not train with it."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HEAVY = ("torch", "pyarrow", "sqlmodel", "sqlalchemy", "alembic", "numpy", "pydantic", "fsspec", "rich")

LOOK = """
import contextlib, io, json, sys
from unlearnd.cli import main

def run(*arguments):
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            main(list(arguments))
        except SystemExit as end:
            assert end.code == 0, (arguments, end.code)

def loaded(names):
    return sorted(set(names) & set(sys.modules))
"""


def fresh(code: str, *arguments: object, cwd: Path | None = None) -> Any:
    """Run `code` in a fresh interpreter and return the JSON it printed."""
    ended = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, timeout=60, cwd=cwd
    )
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """A CSV of twenty rows of five people."""
    path = tmp_path / "rows.csv"
    lines = [f"p{i % 5},{i % 7},{i % 3},{'yes' if i % 2 else 'no'}" for i in range(20)]
    path.write_text("\n".join(["who,a,b,label", *lines]) + "\n")
    return path


def test_importing_the_package_loads_nothing_heavy() -> None:
    code = f"import json, sys, unlearnd; print(json.dumps(sorted(set({HEAVY}) & set(sys.modules))))"
    assert fresh(code) == []


def test_help_of_every_command_loads_nothing_heavy() -> None:
    code = f"""{LOOK}
found = {{}}
for command in [None, *main.list_commands(None)]:
    run(*([command] if command else []), "--help")
    found[str(command)] = loaded({HEAVY})
run("--version")
found["--version"] = loaded({HEAVY})
print(json.dumps(found))
"""
    found = fresh(code)
    assert {command for command, heavy in found.items() if heavy} == set(), found
    assert len(found) > 12


def test_help_is_there_in_well_under_half_a_second() -> None:
    def seconds() -> float:
        # What the process itself took: a machine that is busy with something else says nothing about it.
        begun = os.times()
        subprocess.run([sys.executable, "-c", "from unlearnd.cli import main; main(['--help'])"], capture_output=True)
        ended = os.times()
        return ended.children_user + ended.children_system - begun.children_user - begun.children_system

    assert min(seconds() for _ in range(5)) < 0.5


def test_no_store_here_is_said_without_loading_the_ledger(tmp_path: Path) -> None:
    code = f"""{LOOK}
with contextlib.redirect_stderr(io.StringIO()) as said:
    try:
        main(["status"])
    except SystemExit as end:
        code = end.code
print(json.dumps([code, said.getvalue().startswith("unlearnd: no store here"), loaded({HEAVY})]))
"""
    assert fresh(code, cwd=tmp_path) == [1, True, []]


def test_a_plain_verify_loads_no_click_and_nothing_that_it_does_not_need() -> None:
    release = Path(__file__).parent / "receipts" / "0.1.0"
    receipt = sorted(release.glob("receipts/*.json"))[0]
    ended = subprocess.run(
        [*(sys.executable, "-X", "importtime", "-m", "unlearnd", "verify", receipt), "--trust", release / "trust.json"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 0, ended.stderr
    assert "Assurance level 0" in ended.stdout
    loaded = {line.rpartition("|")[2].strip() for line in ended.stderr.splitlines()}
    assert {"unlearnd.verify.command", "cryptography"} <= loaded
    unneeded = {"click", "unlearnd.cli", "unlearnd.verify.exports", "unlearnd.verify.logs", "dataclasses", "pathlib"}
    assert loaded & {*unneeded, *HEAVY} == set()


def test_listing_plugins_loads_no_torch() -> None:
    code = f"""{LOOK}
run("plugins")
run("plugins", "--json")
print(json.dumps(loaded(("torch", "sqlmodel", "sqlalchemy", "pyarrow"))))
"""
    assert fresh(code) == []


def test_no_command_loads_torch_unless_a_backend_of_torch_is_used(tmp_path: Path, rows: Path) -> None:
    code = f"""{LOOK}
store, rows = sys.argv[1:]
found = {{}}
for line in (
    f"init {{store}}",
    f"ingest people {{rows}} --user who --label label --shards 2 --slices 2",
    "train m --dataset people --backend linear --epochs 1",
    "status",
    "checkpoints m",
    "where --user p1",
    "where --point people:0",
    f"predict m {{rows}}",
    f"evaluate m {{rows}} --label label",
    "erase --user p1 --dry-run",
    "erase --user p1 --no-build",
    "build",
    "migrate",
):
    command, *arguments = line.split()
    run(command, *arguments, *(["--store", store] if command != "init" else []))
    found[line] = loaded(["torch"])
print(json.dumps(found))
"""
    found = fresh(code, tmp_path / "store", rows)
    assert {line for line, heavy in found.items() if heavy} == set()


def test_a_worker_of_a_linear_build_loads_no_torch(tmp_path: Path, rows: Path) -> None:
    # A worker is a process of its own; a module in front of the real torch ends it if it asks.
    code = f"""{LOOK}
import os
store, rows, guard = sys.argv[1:]
os.environ["PYTHONPATH"] = guard
run("init", store)
run("ingest", "people", rows, "--user", "who", "--label", "label", "--shards", "2", "--slices", "2", "--store", store)
run("train", "m", "--dataset", "people", "--backend", "linear", "--epochs", "1", "--workers", "2", "--store", store)
print(json.dumps("trained"))
"""
    guard = tmp_path / "guard"
    guard.mkdir()
    (guard / "torch.py").write_text("raise SystemExit('torch was imported')")
    assert fresh(code, tmp_path / "store", rows, guard) == "trained"


LIKE_ANY = """
import json, os, signal, sys
ours = [name for name in sys.modules if name.startswith("unlearnd")]
files = sorted(os.listdir("/dev/fd"))
seen = [__name__, sys.argv, sys.path, os.getcwd(), dict(os.environ), sys.stdin.read(), ours, files]
print(json.dumps(seen), flush=True)
print("some words", file=sys.stderr)
end = sys.argv[1]
if end == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
sys.exit(3 if end == "code" else "a reason" if end == "reason" else None)
"""


@pytest.mark.parametrize("end", ["well", "code", "reason", "killed"])
def test_processes_that_other_tests_fork_to_save_time_are_like_any(end: str, warm: list[str], tmp_path: Path) -> None:
    def run(python: list[str]) -> list[Any]:
        ended = subprocess.run(
            [*python, "-c", LIKE_ANY, end, "a word", "b"],
            env={"PATH": os.environ["PATH"], "PYTHONPATH": str(tmp_path / "site"), "MINE": "1"},
            input="given",
            capture_output=True,
            text=True,
            cwd=tmp_path,
            check=False,
        )
        return [ended.returncode, json.loads(ended.stdout), ended.stderr]

    plain = run([sys.executable])
    assert plain[0] == {"well": 0, "code": 3, "reason": 1, "killed": -signal.SIGKILL}[end]
    assert plain[1][6] == []
    assert run(warm) == plain
