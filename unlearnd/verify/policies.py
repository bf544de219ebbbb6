"""C2SP tlog-policies: which logs and witnesses an auditor believes, and how many of them (c2sp.org/tlog-policy)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from unlearnd.errors import FormatError
from unlearnd.verify.notes import NoteKey, read_vkey
from unlearnd.verify.texts import is_decimal
from unlearnd.verify.values import Value

MAX_POLICY = 200_000
MAX_NAMES = 1_000
_ALLOWED = bytes([*b"\t\n", *range(0x20, 0x7F), *range(0x80, 0x100)])


class Group(Value):
    """So many of these, each a witness or a group named before."""

    threshold: int
    members: tuple[str, ...]


class Policy(Value):
    """Whom to believe. `quorum` is None when nobody is needed."""

    logs: tuple[NoteKey, ...]
    witnesses: Mapping[str, NoteKey]
    groups: Mapping[str, Group]
    quorum: str | None

    def is_met_by(self, cosigners: Iterable[NoteKey]) -> bool:
        """Say whether these witnesses are enough."""
        keys = {key.public for key in cosigners}
        met = {name for name, key in self.witnesses.items() if key.public in keys}
        # Members are named before their groups, so one walk in order settles all.
        for name, group in self.groups.items():
            if sum(member in met for member in group.members) >= group.threshold:
                met.add(name)
        return self.quorum is None or self.quorum in met


def read_policy(data: bytes) -> Policy:
    """Return the policy of a tlog-policy file."""
    if len(data) > MAX_POLICY:
        raise FormatError(f"the policy is larger than {MAX_POLICY:,} bytes")
    if data.translate(None, _ALLOWED):
        raise FormatError("the policy holds a control character")
    logs: list[NoteKey] = []
    witnesses: dict[str, NoteKey] = {}
    groups: dict[str, Group] = {}
    used: set[str] = set()
    quorums: list[str] = []
    # Octets, not letters: the policy must not mean something else under another version of Unicode.
    for line in data.decode("latin-1").split("\n"):
        words = [word for word in line.replace("\t", " ").split(" ") if word]
        if not words or words[0].startswith("#"):
            continue
        match words:
            case ["log", vkey] | ["log", vkey, _]:
                logs.append(_read_key(vkey, [key.public for key in logs], cosigner=False))
            case ["witness", name, vkey] | ["witness", name, vkey, _]:
                _check_new(name, witnesses, groups)
                witnesses[name] = _read_key(vkey, [key.public for key in witnesses.values()], cosigner=True)
            case ["group", name, threshold, *members] if members:
                _check_new(name, witnesses, groups)
                for member in members:
                    if member not in witnesses and member not in groups:
                        raise FormatError(f"the policy's group {_show(name)} names {_show(member)} before it is there")
                    if member in used:
                        raise FormatError(f"the policy names {_show(member)} in two places")
                    used.add(member)
                groups[name] = Group(_read_threshold(threshold, len(members)), tuple(members))
            case ["quorum", name]:
                if name != "none" and name not in witnesses and name not in groups:
                    raise FormatError(f"the policy's quorum {_show(name)} is not named before")
                quorums.append(name)
            case _:
                raise FormatError(f"the policy has a line that cannot be read: {_show(line)}")
        if len(logs) + len(witnesses) + len(groups) > MAX_NAMES:
            raise FormatError(f"the policy has more than {MAX_NAMES} names")
    if len(quorums) != 1:
        raise FormatError(f"a policy has one quorum line, this one has {len(quorums)}")
    return Policy(tuple(logs), witnesses, groups, None if quorums[0] == "none" else quorums[0])


def count_of(witnesses: Iterable[NoteKey], quorum: int) -> Policy:
    """Return the policy "so many of these"."""
    named = {str(number): key for number, key in enumerate(witnesses)}
    groups = {"all": Group(quorum, tuple(named))} if quorum else {}
    return Policy((), named, groups, "all" if quorum else None)


def _read_key(vkey: str, known: list[bytes], *, cosigner: bool) -> NoteKey:
    try:
        key = read_vkey(vkey.encode("latin-1").decode("utf-8"), cosigner=cosigner)
    except UnicodeDecodeError:
        raise FormatError("the policy has a vkey that is not UTF-8") from None
    if key.public in known:
        raise FormatError(f"the policy has the key of {key.name} twice")
    return key


def _check_new(name: str, *taken: Mapping[str, object]) -> None:
    if name == "none" or any(name in names for names in taken):
        raise FormatError(f"the policy cannot give the name {_show(name)}, or gives it twice")


def _read_threshold(text: str, members: int) -> int:
    number = {"any": 1, "all": members}.get(text)
    if number is None and is_decimal(text, 6):
        number = int(text)
    if number is None or not 1 <= number <= members:
        raise FormatError(f"the policy asks for {_show(text)} of {members}")
    return number


def _show(text: str) -> str:
    return repr(text[:60])
