"""`unlearnd verify` without the command line's library: its words, the files they name, the verdict.

An auditor's script checks thousands of receipts, one process each, and half of such a process would be loading click.
So a call whose every word is understood here is answered here; any other, `--help` and mistakes among them, is
left to the command in `unlearnd.cli`, which says what is wrong. Both take their options from here, and say the same.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from unlearnd.errors import STOPPED, InputError, NotFoundError, UnlearndError
from unlearnd.verify.checks import verify_receipt
from unlearnd.verify.reports import Report
from unlearnd.verify.texts import read_moment

if TYPE_CHECKING:
    from unlearnd.verify.exports import LocalFolder

OPTIONS: Mapping[str, tuple[str, str]] = {
    "trust": ("FILE", "The operator's published trust file."),
    "head": ("OLDER", "A tree head of the log, kept from earlier."),
    "log": ("DIR", "An exported log (unlearnd log export)."),
    "policy": ("FILE", "A C2SP tlog-policy naming the witnesses to believe."),
    "opening": ("FILE", "What the user was given, to see whose receipt it is."),
    "detail": ("FILE", "The detail document; else it is looked for in the exported log."),
    "at": ("MOMENT", "Judge deadlines as of this moment (2026-01-31T12:00:00Z) and not now."),
}
"""What may be given besides the receipt, and `--json`; the first must be."""

_MAX_FILE = 2**30


def run(words: Sequence[str]) -> int | None:
    """Verify as these words of a command line ask and return the exit code; None leaves them to the command."""
    given = understand(words)
    # What to do on a terminal that cannot show every letter, click knows.
    if given is None or not all(stream and stream.encoding == "utf-8" for stream in (sys.stdout, sys.stderr)):
        return None
    as_json = given.pop("json", None) is not None
    try:
        return _answer(given, as_json)
    except BrokenPipeError:
        return 1  # nobody reads any more


def understand(words: Sequence[str]) -> dict[str, str] | None:
    """Return what words of a command line give, by name; None unless each is one that is known and given once."""
    given: dict[str, str] = {}
    rest = iter(words)
    for word in rest:
        name, equals, value = word.removeprefix("--").partition("=")
        if word == "--json":
            name, value = "json", "yes"
        elif word == "-" or not word.startswith("-"):
            name, value = "receipt", word
        elif not word.startswith("--") or name not in OPTIONS:
            return None
        elif not equals:
            value = next(rest, "")
            if value.startswith("-") and value != "-":
                return None
        if name in given or not value or not value.isprintable():
            return None
        given[name] = value
    return given if {"receipt", "trust"} <= given.keys() else None


def verify_files(
    receipt: str,
    trust: str,
    head: str | None = None,
    log: str | None = None,
    policy: str | None = None,
    opening: str | None = None,
    detail: str | None = None,
    at: str | None = None,
) -> Report:
    """Check the receipt in a file, with what other files hold."""
    return verify_receipt(
        read_file(receipt),
        read_file(trust),
        now=_moment(at),
        older_head=read_file(head) if head else None,
        policy=read_file(policy) if policy else None,
        export=open_export(log) if log else None,
        opening=read_file(opening) if opening else None,
        detail=read_file(detail) if detail else None,
    )


def show(report: Report, as_json: bool) -> str:
    """Return what is printed of a report."""
    if not as_json:
        return "\n".join(report.lines())
    import json

    return json.dumps(report.as_json(), indent=2, ensure_ascii=False)


def read_file(name: str) -> bytes:
    """Return the bytes of a file that the command line names; `-` is standard input."""
    try:
        if name == "-":
            return sys.stdin.buffer.read(_MAX_FILE)
        with open(name or os.curdir, "rb") as file:
            return file.read(_MAX_FILE)
    except FileNotFoundError:
        raise NotFoundError(f"no file {name}") from None
    except OSError as error:
        raise InputError(f"the file {name} cannot be read: {error.strerror}") from None


def open_export(name: str) -> LocalFolder:
    """Return the exported log in a folder that the command line names."""
    from unlearnd.verify.exports import LocalFolder  # optional: few receipts are checked with one

    if not os.path.isdir(name):
        raise NotFoundError(f"no folder {name}")
    return LocalFolder(name)


def _answer(given: Mapping[str, str], as_json: bool) -> int:
    try:
        report = verify_files(**given)
        print(show(report, as_json), flush=True)  # noqa: T201
        return report.exit_code
    except UnlearndError as error:
        sentence, code = str(error), error.exit_code
    except KeyboardInterrupt:
        sentence, code = STOPPED, 1
    print(f"unlearnd: {sentence}", file=sys.stderr, flush=True)  # noqa: T201
    return code


def _moment(at: str | None) -> datetime:
    if at is None:
        return datetime.now(UTC)
    try:
        return read_moment(at, "--at")
    except UnlearndError as error:
        raise InputError(str(error)) from None
