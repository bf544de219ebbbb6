"""The witness: cosigns a log that grew, and nothing else."""

import base64
import importlib.util
import json
import os
import stat
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from unlearnd.cli import Commands
from unlearnd.cli.witness import witness as witness_command
from unlearnd.errors import (
    FormatError,
    InclusionError,
    InputError,
    NotFoundError,
    RefusedError,
    SignatureError,
    UnlearndError,
)
from unlearnd.verify import LocalFolder
from unlearnd.verify.notes import NoteKey, check_cosignatures, check_note, read_note, read_tree_head, read_vkey
from unlearnd.witness import Update, WitnessKey, cosign, create_key, read_key, read_state, read_update

TIME = 1_772_400_000


def load_operator() -> Any:
    """Return test_verify.py, whose operator makes honest evidence to start from."""
    name = "operator_of_test_verify"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name("test_verify.py"))
        assert spec
        assert spec.loader
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


MAKE = load_operator()


class Setting:
    """A witness, and a log it watches."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.state = folder, folder / "state.json"
        self.shop = MAKE.make_shop()
        self.public = create_key("witness.example/w1", folder / "w1.key")
        self.key: WitnessKey = read_key((folder / "w1.key").read_text())
        self.log_key: NoteKey = read_vkey(MAKE.vkey(self.shop.origin, 1, self.shop.log_key))

    def ask(self, size: int, proof: tuple[bytes, ...] | None = None, old: int | None = None, **more: Any) -> bytes:
        return cosign(self.state, self.key, [self.log_key], Update(self.shop.head(size), old, proof), TIME, **more)

    def proof(self, old: int, size: int) -> tuple[bytes, ...]:
        return tuple(MAKE.consistency_of(old, self.shop.leaves[:size]))

    @property
    def seen(self) -> int:
        return read_tree_head(read_note(read_state(self.state)[self.shop.origin].encode()).text).size


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    return Setting(tmp_path)


def test_a_cosigned_note_carries_both_signatures(setting: Setting) -> None:
    note = read_note(setting.ask(4))
    assert check_note(note, [setting.log_key]) == (setting.log_key,)
    (found,) = check_cosignatures(note, [setting.public])
    assert (found.key, found.time) == (setting.public, TIME)


def test_a_log_may_grow_from_any_size_to_any_size(setting: Setting) -> None:
    for old in range(1, len(setting.shop.leaves)):
        for size in range(old, len(setting.shop.leaves) + 1):
            setting.state.unlink(missing_ok=True)
            setting.ask(old)
            setting.ask(size, setting.proof(old, size), old)
            assert setting.seen == size


def test_an_exported_log_serves_as_proof(setting: Setting, tmp_path: Path) -> None:
    export = LocalFolder(setting.shop.export(tmp_path / "log"))
    setting.ask(5)
    setting.ask(14, export=export)
    setting.ask(14, export=export)
    assert setting.seen == 14


def test_a_rewritten_log_is_not_cosigned(setting: Setting, tmp_path: Path) -> None:
    setting.ask(9)
    MAKE.rewrite(setting.shop, 4, lambda said: said["roots"][0].__setitem__(3, 8))
    for size in (9, 14):
        with pytest.raises(InclusionError):
            setting.ask(size, setting.proof(9, size), 9)
        with pytest.raises(InclusionError):
            setting.ask(size, export=LocalFolder(setting.shop.export(tmp_path / "log")))
    assert setting.seen == 9


def test_a_log_cut_short_is_not_cosigned_whatever_the_export_shows(setting: Setting, tmp_path: Path) -> None:
    setting.ask(9)
    with pytest.raises(InclusionError):
        setting.ask(8, export=LocalFolder(setting.shop.export(tmp_path / "log")))
    assert setting.seen == 9


def test_an_export_of_another_log_than_the_tree_head_is_no_proof(setting: Setting, tmp_path: Path) -> None:
    honest = setting.shop.head()
    MAKE.rewrite(setting.shop, 12, lambda said: said["models"].append(["x", 1, 1]))
    export = LocalFolder(setting.shop.export(tmp_path / "log"))
    setting.ask(5)
    with pytest.raises(InclusionError):
        cosign(setting.state, setting.key, [setting.log_key], Update(honest), TIME, export)


REFUSED: dict[str, tuple[Callable[[Setting], object], type[UnlearndError]]] = {
    "smaller than before": (lambda s: s.ask(8), InclusionError),
    "no proof": (lambda s: s.ask(12), RefusedError),
    "an empty proof": (lambda s: s.ask(12, ()), InclusionError),
    "a proof from another size": (lambda s: s.ask(12, s.proof(7, 12), 7), RefusedError),
    "a proof from the beginning": (lambda s: s.ask(12, (), 0), RefusedError),
    "a proof that is too long": (lambda s: s.ask(12, (*s.proof(9, 12), bytes(32)), 9), InclusionError),
    "a proof to another size": (lambda s: s.ask(12, s.proof(9, 13), 9), InclusionError),
    "a size beyond the tree": (lambda s: s.ask(12, (), 13), FormatError),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_and_nothing_remembered(setting: Setting, name: str) -> None:
    setting.ask(9)
    before = setting.state.read_bytes()
    ask, error = REFUSED[name]
    with pytest.raises(error):
        ask(setting)
    assert setting.state.read_bytes() == before


def test_a_proof_from_the_empty_tree_is_empty(setting: Setting) -> None:
    with pytest.raises(InclusionError):
        setting.ask(4, (bytes(32),), 0)
    setting.ask(4, (), 0)


def test_unsigned_and_unknown_logs(setting: Setting) -> None:
    other = MAKE.make_shop("f" * 32)
    with pytest.raises(NotFoundError):
        cosign(setting.state, setting.key, [setting.log_key], Update(other.head()), TIME)
    forged = setting.shop.head(key=MAKE.make_key("outsider"))
    with pytest.raises(SignatureError):
        cosign(setting.state, setting.key, [setting.log_key], Update(forged), TIME)
    assert not setting.state.exists()


def test_several_logs_in_one_file(setting: Setting) -> None:
    other = MAKE.make_shop("é" * 4)
    other_key = read_vkey(MAKE.vkey(other.origin, 1, other.log_key))
    setting.ask(5)
    cosign(setting.state, setting.key, [setting.log_key, other_key], Update(other.head(7)), TIME)
    setting.ask(9, setting.proof(5, 9))
    assert set(read_state(setting.state)) == {setting.shop.origin, other.origin}


def test_cosigning_again_replaces_the_line_and_keeps_those_of_others(setting: Setting) -> None:
    setting.shop.cosigners = {"w2": MAKE.make_key("w2")}
    once = setting.ask(5)
    twice = cosign(setting.state, setting.key, [setting.log_key], Update(once), TIME + 60)
    names = [line.name for line in read_note(twice).signatures]
    assert names == [setting.shop.origin, "w2", "witness.example/w1"]


def test_of_many_at_once_none_rolls_the_log_back(setting: Setting, tmp_path: Path) -> None:
    export = LocalFolder(setting.shop.export(tmp_path / "log"))

    def ask(size: int) -> int:
        try:
            setting.ask(size, export=export)
        except InclusionError:
            return 0
        return size

    with ThreadPoolExecutor(8) as pool:
        done = list(pool.map(ask, [*range(1, 15)] * 3))
    assert setting.seen == max(done) == 14


def test_a_state_that_cannot_be_read_stops_the_witness(setting: Setting) -> None:
    setting.ask(5)
    for damage in (b"", b"{}", setting.state.read_bytes()[:-9], b'{"mediaType":"x","heads":[]}'):
        setting.state.write_bytes(damage)
        with pytest.raises(InputError):
            setting.ask(5)


# Keys.


def test_a_key_file_is_its_owners_alone_and_never_overwritten(setting: Setting) -> None:
    path = setting.folder / "w1.key"
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    with pytest.raises(RefusedError):
        create_key("other", path)
    assert "seed" not in repr(setting.key)
    secret = path.read_text().strip().split("+", 4)[4]
    assert secret not in repr(setting.key)


@pytest.mark.parametrize("name", ["", "a b", "a+b", "a\n", "\x1b"])
def test_names_that_no_note_can_hold(name: str, tmp_path: Path) -> None:
    with pytest.raises(InputError):
        create_key(name, tmp_path / "key")


@pytest.mark.parametrize("text", ["", "PRIVATE+KEY+", "PRIVATE+KEY+a+b", "PRIVATE+KEY+a+00000000+AAAA", "x" * 100])
def test_key_files_that_are_none(text: str) -> None:
    with pytest.raises(InputError):
        read_key(text)


def test_a_key_under_another_id_is_refused(setting: Setting) -> None:
    text = (setting.folder / "w1.key").read_text()
    with pytest.raises(InputError):
        read_key(text.replace(setting.public.id.hex(), "00000000"))


# The command.


def run(*arguments: object, given: bytes | None = None) -> Result:
    group = Commands()
    group.add_command(witness_command)
    return CliRunner().invoke(group, ["witness", *map(str, arguments)], input=given)


def test_the_command_from_key_to_cosigned_tree_head(setting: Setting, tmp_path: Path) -> None:
    made = run("--new-key", "w2", tmp_path / "w2.key")
    assert made.exit_code == 0
    public = read_vkey(made.stdout.strip(), cosigner=True)
    common = ["--state", tmp_path / "s.json", "--key", tmp_path / "w2.key", "--log-key", setting.log_key.vkey]
    first = run(*common, "-", given=setting.shop.head(5))
    assert first.exit_code == 0, first.output
    assert check_cosignatures(read_note(first.stdout_bytes), [public])
    # A proof in a file.
    (tmp_path / "head").write_bytes(setting.shop.head(9))
    lines = [base64.b64encode(value).decode() for value in setting.proof(5, 9)]
    (tmp_path / "proof").write_text("\n".join(lines) + "\n")
    assert run(*common, tmp_path / "head", "--proof", tmp_path / "proof").exit_code == 0
    # A whole request, and the answer to a file.
    lines = ["old 9", *(base64.b64encode(value).decode() for value in setting.proof(9, 12)), "", ""]
    request = "\n".join(lines).encode() + setting.shop.head(12)
    assert read_update(request).old == 9
    assert run(*common, "-", "--out", tmp_path / "cosigned", given=request).exit_code == 0
    assert check_cosignatures(read_note((tmp_path / "cosigned").read_bytes()), [public])
    # An exported log.
    (tmp_path / "head").write_bytes(setting.shop.head())
    assert run(*common, tmp_path / "head", "--log", setting.shop.export(tmp_path / "log")).exit_code == 0
    state = json.loads((tmp_path / "s.json").read_text())
    assert len(state["heads"]) == 1


def test_the_command_refuses_with_one_sentence(setting: Setting, tmp_path: Path) -> None:
    common = ["--state", setting.state, "--key", tmp_path / "w1.key", "--log-key", setting.log_key.vkey]
    head, forged = tmp_path / "head", tmp_path / "forged"
    head.write_bytes(setting.shop.head())
    forged.write_bytes(setting.shop.head(key=MAKE.make_key("outsider")))
    cases: list[tuple[list[object], int]] = [
        ([*common, forged], 3),
        ([*common, tmp_path / "nowhere"], 1),
        (["--state", setting.state, "--key", head, "--log-key", setting.log_key.vkey, head], 1),
        (["--state", setting.state, "--key", tmp_path / "w1.key", "--log-key", "nonsense", head], 1),
        ([head], 2),
        (["--new-key", "x", tmp_path / "w1.key"], 1),
    ]
    for arguments, code in cases:
        ended = run(*arguments)
        assert ended.exit_code == code, ended.output
        assert not ended.stdout
        assert code == 2 or ended.stderr.count("\n") == 1
