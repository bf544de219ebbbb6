"""Plugins are found, checked and named when they are at fault."""

import os
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from textwrap import dedent

import pytest

from unlearnd.errors import NotFoundError, PluginError
from unlearnd.hookspecs import Backend
from unlearnd.plugins import GROUP, Plugins, gather, load_plugins

DEFAULT = EntryPoint("default", "unlearnd.default_plugins", GROUP)

BACKEND = """
from unlearnd import hookimpl

class Guess:
    name, version, sliceable, deterministic = "guess", "1", True, True
    def settings(self, given): return {}
    def initial_state(self, settings, shape, classes, seed): return {}
    def train(self, settings, job, device, on_progress): return {}
    def predictor(self, settings, states, device): return None
    def environment(self, device): return {}

@hookimpl
def register_backends(register):
    register(Guess())
"""

Install = Callable[[str, str], EntryPoint]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Return a function that writes a plugin and gives back its entry point, as an installed package would."""
    monkeypatch.syspath_prepend(tmp_path)
    # The names of modules are this test's own, so that no other test finds them loaded.
    unique = f"plugin_{abs(hash(tmp_path)):x}"

    def write(name: str, code: str) -> EntryPoint:
        (tmp_path / f"{unique}_{name}.py").write_text(dedent(code))
        return EntryPoint(name, f"{unique}_{name}", GROUP)

    return write


def fault(*entries: EntryPoint) -> str:
    with pytest.raises(PluginError) as caught:
        gather(list(entries))
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_what_comes_in_the_box_is_registered_like_everybody_elses() -> None:
    plugins = gather([DEFAULT])
    assert set(plugins.backends) == {"linear"}
    assert set(plugins.placements) == {
        "uniform",
        "aware",
        "aware-algorithm-1",
        "aware-both",
        "aware-square-root",
    }
    assert set(plugins.executors) == {"serial", "processes"}
    assert set(plugins.aggregators) == {"vote", "mean"}
    assert isinstance(plugins.backend("linear"), Backend)
    assert plugins.installed[0].brings[0] == "backend linear"


def test_installed_plugins_are_loaded_once_and_name_their_package_and_version() -> None:
    plugins = load_plugins()
    assert load_plugins() is plugins
    default = next(plugin for plugin in plugins.installed if plugin.name == "default")
    assert (default.distribution, default.version) == ("unlearnd", "0.1.0")


def test_a_plugin_brings_a_backend_next_to_ours(install: Install) -> None:
    plugins = gather([DEFAULT, install("guessing", BACKEND)])
    assert set(plugins.backends) == {"linear", "guess"}
    assert [plugin.brings for plugin in plugins.installed if plugin.name == "guessing"] == [("backend guess",)]


def test_a_plugin_may_bring_placements_executors_and_aggregators(install: Install) -> None:
    entry = install(
        "more",
        """
        from unlearnd import hookimpl
        @hookimpl
        def register_placements(register): register("here", lambda *a: None)
        @hookimpl
        def register_executors(register): register("cloud", lambda *a: None)
        @hookimpl
        def register_aggregators(register): register("median", lambda *a: None)
        """,
    )
    plugins: Plugins = gather([DEFAULT, entry])
    assert plugins.executor("cloud")
    assert plugins.aggregator("median")
    assert "here" in plugins.placements
    assert plugins.installed[1].brings == ("placement here", "executor cloud", "aggregator median")


def test_what_is_not_installed_is_named_with_what_is() -> None:
    plugins = gather([DEFAULT])
    with pytest.raises(NotFoundError, match="no backend 'torhc'; installed: linear"):
        plugins.backend("torhc")
    with pytest.raises(NotFoundError, match="no executor 'clowd'; installed: processes, serial"):
        plugins.executor("clowd")
    with pytest.raises(NotFoundError, match="no aggregator 'modus'; installed: mean, vote"):
        plugins.aggregator("modus")


def test_a_misspelt_hook_is_named_with_the_plugin_and_the_hooks_there_are(install: Install) -> None:
    entry = install("guessing", BACKEND.replace("register_backends", "register_backend"))
    said = fault(DEFAULT, entry)
    assert "plugin 'guessing' implements a hook 'register_backend' that does not exist" in said
    for hook in ("register_backends", "register_placements", "register_executors", "register_aggregators"):
        assert hook in said


def test_a_hook_with_wrong_arguments_names_the_plugin(install: Install) -> None:
    said = fault(DEFAULT, install("guessing", BACKEND.replace("(register):", "(registry):")))
    assert "plugin 'guessing'" in said
    assert "registry" in said


@pytest.mark.parametrize("kind", ["backend", "placement", "executor", "aggregator"])
def test_a_name_registered_twice_names_both_plugins(install: Install, kind: str) -> None:
    code = (
        BACKEND
        if kind == "backend"
        else f"""
from unlearnd import hookimpl
@hookimpl
def register_{kind}s(register): register("guess", lambda *a: None)
"""
    )
    said = fault(DEFAULT, install("one", code), install("two", code))
    assert f"the {kind} 'guess' is registered twice: by plugin 'one' and by plugin 'two'" in said


def test_a_name_of_ours_cannot_be_taken_either(install: Install) -> None:
    said = fault(DEFAULT, install("guessing", BACKEND.replace('"guess"', '"linear"')))
    assert "the backend 'linear' is registered twice: by plugin 'default' and by plugin 'guessing'" in said


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import a_module_nobody_has", "a_module_nobody_has"),
        ("raise RuntimeError('no licence')", "no licence"),
        ("def broken(:", "syntax"),
        ("raise KeyError", "KeyError"),
    ],
    ids=["missing module", "raises", "syntax error", "raises without a word"],
)
def test_a_plugin_that_cannot_be_imported_names_itself_and_why(install: Install, code: str, reason: str) -> None:
    said = fault(DEFAULT, install("guessing", code))
    assert "plugin 'guessing'" in said
    assert reason in said


def test_a_plugin_that_is_not_there_names_itself() -> None:
    said = fault(DEFAULT, EntryPoint("gone", "a_module_nobody_has", GROUP))
    assert "plugin 'gone' (a_module_nobody_has) cannot be loaded" in said
    assert "nothing_here" in fault(DEFAULT, EntryPoint("gone", "unlearnd.errors:nothing_here", GROUP))


def test_two_plugins_of_one_name_are_told_apart(install: Install) -> None:
    one, two = install("one", BACKEND), install("two", BACKEND.replace('"guess"', '"other"'))
    said = fault(DEFAULT, one, EntryPoint("one", two.value, GROUP))
    assert "plugin 'one'" in said
    assert two.value in said


@pytest.mark.parametrize("hook", ["register_backends", "register_executors"])
def test_a_plugin_that_raises_while_registering_names_itself_and_why(install: Install, hook: str) -> None:
    code = f"from unlearnd import hookimpl\n@hookimpl\ndef {hook}(register): raise ValueError('no GPU')\n"
    assert "plugin 'guessing' failed while registering: no GPU" in fault(DEFAULT, install("guessing", code))


def test_a_backend_that_lacks_methods_is_told_which(install: Install) -> None:
    lacking = (
        BACKEND.replace("    def environment(self, device): return {}\n", "")
        .replace("sliceable, ", "")
        .replace('"1", True, True', '"1", True')
    )
    said = fault(DEFAULT, install("guessing", lacking))
    assert said == "plugin 'guessing' registers a backend that lacks environment, sliceable"


def test_a_class_in_the_place_of_a_backend_is_told(install: Install) -> None:
    # `register(Guess)` without the brackets looks like a backend and fails at the first call.
    said = fault(DEFAULT, install("guessing", BACKEND.replace("register(Guess())", "register(Guess)")))
    assert "plugin 'guessing'" in said
    assert "class" in said


@pytest.mark.parametrize("call", ["register('x')", "register('x', None)", "register('', print)", "register(3, print)"])
def test_registering_something_else_than_a_name_and_a_callable_names_the_plugin(install: Install, call: str) -> None:
    code = f"from unlearnd import hookimpl\n@hookimpl\ndef register_executors(register): {call}\n"
    assert "plugin 'guessing'" in fault(DEFAULT, install("guessing", code))


def test_a_faulty_plugin_says_how_to_go_on_without_a_traceback(tmp_path: Path) -> None:
    # As a person meets it: an installed package whose plugin cannot be imported.
    package = tmp_path / "broken-0.1.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 0.1\n")
    (package / "entry_points.txt").write_text("[unlearnd]\nbroken = broken_plugin\n")
    (tmp_path / "broken_plugin.py").write_text("import a_module_nobody_has\n")
    ended = subprocess.run(
        [sys.executable, "-c", "from unlearnd.cli import main; main()", "plugins"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert ended.returncode == 1
    assert ended.stdout == ""
    assert ended.stderr.startswith("unlearnd: plugin 'broken' (broken_plugin) cannot be loaded")
    assert ended.stderr.count("\n") == 1


KEY_SERVICE = """
import hashlib
from pathlib import Path
from cryptography.hazmat.primitives import serialization as forms
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from unlearnd import hookimpl
from unlearnd.errors import NotFoundError

SERVICE = Path(__file__).parent / "service"  # what stands for a service that signs and never gives a key out

class Remote:
    def __init__(self, seed):
        self._private = Ed25519PrivateKey.from_private_bytes(seed)
        self.public = self._private.public_key().public_bytes(forms.Encoding.Raw, forms.PublicFormat.Raw)
    def sign(self, message):
        if (SERVICE / "away").exists():
            raise ConnectionError("no route to the key service")
        return self._private.sign(message + b"!" if (SERVICE / "wrong").exists() else message)

def versions(role):
    newest = int((SERVICE / "version").read_text())
    return [Remote(hashlib.sha256(f"{role} {number}".encode()).digest()) for number in range(newest, 0, -1)]

def make(folder, role):
    name, _, former = role.partition("-")
    found = [one for one in versions(name) if not former or former in (SERVICE / "ids").read_text()]
    if not found:
        raise NotFoundError(f"the service has no key {role}")
    return found[1] if former and len(found) > 1 else found[0]

@hookimpl
def register_signers(register):
    register("vault", make)
"""


def test_a_key_service_signs_for_a_store_from_its_first_leaf_and_through_a_rotation(
    tmp_path: Path, warm: list[str]
) -> None:
    (tmp_path / "vault.py").write_text(KEY_SERVICE)
    information = tmp_path / "vault-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: vault\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text("[unlearnd]\nvault = vault\n")
    service = tmp_path / "service"
    service.mkdir()
    (service / "version").write_text("1")
    (service / "ids").write_text("")
    rows = "".join(f"u{n % 20},{n},{n % 2}\n" for n in range(200))
    (tmp_path / "d.csv").write_text("who,x,y\n" + rows)

    def run(*arguments: str, code: int = 0) -> str:
        ended = subprocess.run(
            [*warm, "-c", "from unlearnd.__main__ import main; main()", *arguments],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(tmp_path), "UNLEARND_STORE": "s"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert ended.returncode == code, ended
        return ended.stdout + ended.stderr

    def verify_all() -> list[Path]:
        receipts = sorted((tmp_path / "s" / "storage" / "evidence" / "receipts").iterdir())
        for receipt in receipts:
            assert "PASS" in run("verify", str(receipt), "--trust", "s/keys/trust.json")
        return receipts

    assert "no signer 'volt'; installed: file, vault" in run("init", "s", "--signer", "volt", code=1)
    assert not (tmp_path / "s").exists()
    (service / "away").touch()
    assert "no route to the key service" in run("init", "s", "--signer", "vault", code=1)
    (service / "away").unlink()
    run("init", "s", "--signer", "vault")
    assert sorted(path.name for path in (tmp_path / "s" / "keys").iterdir()) == [
        *("log.pub", "pepper.key", "placement.key", "receipt.pub", "trust.json")
    ]
    run("ingest", "d", "d.csv", "--user", "who", "--label", "y", "--classes", "0,1", "--shards", "2", "--slices", "2")
    run("train", "m", "--dataset", "d", "--backend", "linear", "--epochs", "1")
    run("erase", "--user", "u1")
    assert len(verify_all()) == 1

    assert "still gives the receipt key in use" in run("keys", "rotate", "receipt", code=1)
    (service / "ids").write_text(run("keys", "list", "--json"))
    (service / "version").write_text("2")
    run("keys", "rotate", "receipt")
    run("keys", "rotate", "log")
    run("erase", "--user", "u2")
    assert len(verify_all()) == 2
    assert "FAIL" not in run("audit")

    (service / "away").touch()
    said = run("erase", "--user", "u3", code=1)
    assert "the signer 'vault' failed: ConnectionError: no route to the key service" in said
    (service / "away").unlink()
    (service / "wrong").touch()
    assert "a signature that does not hold under its key" in run("erase", "--user", "u3", code=1)
    (service / "wrong").unlink()
    run("erase", "--user", "u3")
    assert len(verify_all()) == 3
