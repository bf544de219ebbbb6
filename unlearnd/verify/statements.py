"""Read JSON so that it can be read in one way only, and statements in their canonical bytes.

Sizes are bounded before parsing. Duplicate keys, floats, integers of 2^53 and more, keys outside ASCII and lone
surrogates are refused: parsers disagree about them. For what is left, RFC 8785 is what `json.dumps` writes with
sorted keys and no spaces.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from unlearnd.errors import FormatError
from unlearnd.verify.hashes import sha256
from unlearnd.verify.texts import is_hex, read_digest, read_moment
from unlearnd.verify.values import Value

MAX_PAYLOAD = 65_535
STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
_PREDICATE = "https://unlearnd.dev/"


class Statement(Value):
    """One leaf of the log, read."""

    kind: str
    """`genesis`, `erasure`, …; empty for a predicate type that is not ours."""
    subject: tuple[tuple[str, str], ...]
    """Names and SHA-256 digests."""
    predicate: Mapping[str, Any]


def read_json(data: bytes, what: str, limit: int) -> Any:
    """Return the value of a JSON document of at most `limit` bytes."""
    if len(data) > limit:
        raise FormatError(f"{what} is larger than {limit:,} bytes")
    try:
        text = data.decode("utf-8")
        value = json.loads(
            text, object_pairs_hook=_read_object, parse_int=_read_int, parse_float=_refuse, parse_constant=_refuse
        )
        # Lone surrogates can be spelt as escapes in JSON, but no UTF-8 can hold them.
        if "\\u" in text:
            canonical(value)
    except FormatError as error:
        raise FormatError(f"{what} {error}") from None
    except UnicodeDecodeError:
        raise FormatError(f"{what} is not UTF-8") from None
    except UnicodeEncodeError:
        raise FormatError(f"{what} holds a lone surrogate") from None
    except RecursionError:
        raise FormatError(f"{what} is nested too deeply") from None
    except ValueError:
        raise FormatError(f"{what} is not JSON") from None
    return value


def canonical(value: Any) -> bytes:
    """Return the RFC 8785 bytes of a value that `read_json` could have returned."""
    return json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":")).encode("utf-8")


def read_canonical(data: bytes, what: str, limit: int) -> Any:
    """Return the value of a JSON document, refusing any but its RFC 8785 bytes."""
    value = read_json(data, what, limit)
    try:
        same = canonical(value) == data
    except RecursionError:
        raise FormatError(f"{what} is nested too deeply") from None
    if not same:
        raise FormatError(f"{what} is not canonical JSON (RFC 8785)")
    return value


def read_statement(payload: bytes) -> Statement:
    """Return the statement of a payload."""
    value = Fields(read_canonical(payload, "the payload", MAX_PAYLOAD), "the payload")
    if value.text("_type") != STATEMENT_TYPE:
        raise FormatError("the payload is not an in-toto Statement v1")
    subject = []
    for number, given in enumerate(value.list("subject")):
        entry = Fields(given, f"subject {number}")
        subject.append((entry.text("name"), entry.within("digest").digest("sha256")))
    if not subject:
        raise FormatError("the payload has no subject")
    kind = value.text("predicateType")
    kind = kind[len(_PREDICATE) : -len("/v1")] if kind.startswith(_PREDICATE) and kind.endswith("/v1") else ""
    return Statement(kind, tuple(subject), value.within("predicate").value)


def digest_of(predicate: Mapping[str, Any]) -> str:
    """Return the digest under which a predicate is the subject of its leaf."""
    return sha256(canonical(predicate)).hexdigest()


class Fields:
    """A JSON object whose fields are asked for by name and kind; FormatError when one is missing or another kind."""

    def __init__(self, value: Any, what: str) -> None:
        if not isinstance(value, dict):
            raise FormatError(f"{what} is not a JSON object")
        self.value: Mapping[str, Any] = value
        self._what = what

    def text(self, name: str) -> str:
        """Return a text that is not empty."""
        value = self._get(name)
        if not isinstance(value, str) or not value:
            raise self._wrong(name, "a text")
        return value

    def text_or_empty(self, name: str) -> str:
        """Return a text."""
        value = self._get(name)
        if not isinstance(value, str):
            raise self._wrong(name, "a text")
        return value

    def count(self, name: str) -> int:
        """Return an integer that is not negative."""
        value = self._get(name)
        if type(value) is not int or value < 0:
            raise self._wrong(name, "a count")
        return value

    def count_or_none(self, name: str) -> int | None:
        """Return an integer that is not negative, or None for null."""
        return None if self._get(name) is None else self.count(name)

    def truth(self, name: str) -> bool:
        """Return true or false."""
        value = self._get(name)
        if not isinstance(value, bool):
            raise self._wrong(name, "true or false")
        return value

    def choice(self, name: str, *choices: str) -> str:
        """Return one of the texts named."""
        value = self._get(name)
        if not isinstance(value, str) or value not in choices:
            raise self._wrong(name, " or ".join(choices))
        return value

    def digest(self, name: str) -> str:
        """Return 64 hexadecimal digits."""
        return read_digest(self._get(name), f"{name} of {self._what}").hex()

    def moment(self, name: str) -> datetime:
        """Return a moment."""
        return read_moment(self._get(name), f"{name} of {self._what}")

    def list(self, name: str) -> Sequence[Any]:
        """Return a list."""
        value = self._get(name)
        if not isinstance(value, list):
            raise self._wrong(name, "a list")
        return value

    def texts(self, name: str) -> Sequence[str]:
        """Return a list of texts."""
        value = self.list(name)
        if not all(isinstance(entry, str) for entry in value):
            raise self._wrong(name, "a list of texts")
        return value

    def counts(self, name: str) -> Sequence[int]:
        """Return a list of integers that are not negative."""
        value = self.list(name)
        if not all(map(is_count, value)):
            raise self._wrong(name, "a list of counts")
        return value

    def rows(self, name: str, *kinds: Callable[[Any], bool]) -> Sequence[Sequence[Any]]:
        """Return a list of lists, each of the kinds given, in that order."""
        value = self.list(name)
        for row in value:
            if not isinstance(row, list) or len(row) != len(kinds):
                raise self._wrong(name, f"a list of lists of {len(kinds)}")
            if not all(fits(cell) for fits, cell in zip(kinds, row, strict=True)):
                raise self._wrong(name, "what its format says")
        return value

    def within(self, name: str) -> Fields:
        """Return the object under `name`."""
        return Fields(self._get(name), f"{name} of {self._what}")

    def _get(self, name: str) -> Any:
        if name not in self.value:
            raise FormatError(f"{self._what} has no {name}")
        return self.value[name]

    def _wrong(self, name: str, kind: str) -> FormatError:
        return FormatError(f"{name} of {self._what} is not {kind}")


def is_text(value: Any) -> bool:
    """Say whether a cell is a text that is not empty."""
    return isinstance(value, str) and bool(value)


def is_count(value: Any) -> bool:
    """Say whether a cell is an integer that is not negative."""
    return type(value) is int and value >= 0


def is_digest(value: Any) -> bool:
    """Say whether a cell is 64 lower-case hexadecimal digits."""
    return isinstance(value, str) and is_hex(value, 64)


def is_digest_or_empty(value: Any) -> bool:
    """Say whether a cell is a digest or the empty text."""
    return value == "" or is_digest(value)


def _read_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    read = dict(pairs)
    if len(read) != len(pairs):
        raise FormatError("has a key twice in one object")
    if not all(map(str.isascii, read)):
        raise FormatError("has a key outside ASCII")
    return read


def _read_int(text: str) -> int:
    # 2^53 has sixteen digits. Length first: turning a long text into a number takes long.
    if len(text) > 17 or abs(int(text)) >= 2**53:
        raise FormatError("holds an integer of 2^53 or more")
    return int(text)


def _refuse(text: str) -> NoReturn:
    raise FormatError("holds a number that is not an integer")
