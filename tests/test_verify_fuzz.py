"""Whatever bytes come in, the verifier answers with a report or an error of ours, and soon."""

import base64
import hashlib
import importlib.util
import json
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from unlearnd.errors import VerificationError
from unlearnd.verify import verify_receipt
from unlearnd.verify.exports import read_bundle
from unlearnd.verify.notes import check_cosignatures, check_note, read_note, read_tree_head, read_vkey
from unlearnd.verify.policies import read_policy
from unlearnd.verify.proofs import read_proof
from unlearnd.verify.receipts import MAX_DETAIL, read_detail, read_opening, read_receipt
from unlearnd.verify.statements import canonical, is_digest, read_canonical, read_json, read_statement
from unlearnd.verify.texts import is_decimal, read_base64, read_decimal, read_digest, read_moment
from unlearnd.verify.trust import read_head, read_trust
from unlearnd.witness import read_proof_lines, read_update


def load_operator() -> Any:
    """Return test_verify.py, whose operator makes honest evidence to start from."""
    name = "operator_of_test_verify"
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name("test_verify.py"))
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


MAKE = load_operator()
SHOP = MAKE.make_shop()
SHOP.cosigners = {"w1": MAKE.make_key("w1"), "w2": MAKE.make_key("w2")}
KEY = read_vkey(MAKE.vkey(SHOP.origin, 1, SHOP.log_key))
WITNESS = read_vkey(MAKE.vkey("w1", 4, MAKE.make_key("w1")), cosigner=True)
NOW = datetime(2026, 3, 20, tzinfo=UTC)
POLICY = MAKE.make_policy("w1", "w2", log=f"log {MAKE.vkey(SHOP.origin, 1, SHOP.log_key)}")

HONEST: dict[str, tuple[bytes, Callable[[bytes], object]]] = {
    "receipt": (SHOP.receipt(MAKE.RECEIPT), read_receipt),
    "note": (SHOP.head(), lambda data: check_note(read_note(data), [KEY])),
    "cosigned note": (SHOP.head(), lambda data: check_cosignatures(read_note(data), [WITNESS])),
    "tree head": (SHOP.head(), read_head),
    "proof": (SHOP.proof(MAKE.RECEIPT).encode(), read_proof),
    "trust file": (SHOP.trust(), read_trust),
    "opening": (MAKE.make_opening(), read_opening),
    "detail": (canonical(MAKE.make_detail(1)), lambda data: read_detail(data, MAX_DETAIL)),
    "policy": (POLICY, read_policy),
    "statement": (SHOP.leaves[MAKE.RECEIPT], read_statement),
    "bundle": (
        b"".join(len(leaf).to_bytes(2, "big") + leaf for leaf in SHOP.leaves),
        lambda data: read_bundle(data, 14),
    ),
    "vkey": (KEY.vkey.encode(), lambda data: read_vkey(data.decode("latin-1"))),
    "tree head text": (b"log\n1\n" + b"A" * 43 + b"=\n", lambda data: read_tree_head(data.decode("latin-1"))),
    "witness request": (b"old 3\n" + b"A" * 43 + b"=\n\n" + SHOP.head(), read_update),
    "witness proof": (b"old 3\n" + b"A" * 43 + b"=\n", read_proof_lines),
}

quick = settings(max_examples=150, deadline=2000, suppress_health_check=[HealthCheck.too_slow])
PIECES = st.sampled_from(
    [
        *(b"", b"\n", b"\n\n", b"\x00", b"\xff", b'"', b"{", b"}", b"[", b"]" * 9, b"[" * 3000, b"=", b"+", b" ", b","),
        *(b"null", b"true", b"-1", b"1e9", b"9" * 400, b"\\ud800", b"\\u0000", "—".encode(), b"\xe2\x80\x94 a b\n"),
        *(b"index 0", b"quorum none\n", b"group g any g\n", b"18446744073709551616", b"A" * 5000, "\u2028".encode()),
    ]
)


@st.composite
def damaged(draw: st.DrawFn, honest: bytes) -> bytes:
    """Return honest bytes with a few pieces cut, doubled or put in."""
    data = honest
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(data)))
        end = min(len(data), start + draw(st.integers(0, 40)))
        piece = draw(st.one_of(PIECES, st.binary(max_size=8), st.just(data[start:end] * 2)))
        data = data[:start] + piece + data[end:]
    return data


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats() | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=10,
)


@st.composite
def altered(draw: st.DrawFn, honest: bytes) -> bytes:
    """Return an honest JSON document with one value, wherever it stands, replaced or taken away."""
    value = json.loads(honest)
    places: list[tuple[Any, Any]] = []

    def walk(node: Any) -> None:
        for key in node if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ():
            places.append((node, key))
            walk(node[key])

    walk(value)
    node, key = draw(st.sampled_from(places))
    if draw(st.booleans()):
        node[key] = draw(json_values)
    else:
        del node[key]
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "surrogatepass")


def ours_or_fine(read: Callable[[bytes], object], data: bytes) -> None:
    with suppress(VerificationError):
        read(data)


@pytest.mark.parametrize("name", HONEST)
def test_honest_bytes_are_read(name: str) -> None:
    honest, read = HONEST[name]
    read(honest)


@pytest.mark.parametrize("name", HONEST)
@quick
@given(data=st.data())
def test_damaged_bytes_raise_nothing_but_our_errors(name: str, data: st.DataObject) -> None:
    honest, read = HONEST[name]
    ours_or_fine(read, data.draw(damaged(honest)))


@pytest.mark.parametrize("name", HONEST)
@quick
@given(data=st.binary(max_size=300))
def test_any_bytes_raise_nothing_but_our_errors(name: str, data: bytes) -> None:
    ours_or_fine(HONEST[name][1], data)


@pytest.mark.parametrize("name", ["receipt", "trust file", "opening", "detail", "statement"])
@quick
@given(data=st.data())
def test_altered_documents_raise_nothing_but_our_errors(name: str, data: st.DataObject) -> None:
    honest, read = HONEST[name]
    ours_or_fine(read, data.draw(altered(honest)))


@quick
@given(value=json_values)
def test_what_is_read_is_written_back_the_same(value: Any) -> None:
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), sort_keys=True).encode("utf-8", "surrogatepass")
    try:
        read = read_json(text, "it", 1_000_000)
    except VerificationError:
        return
    assert read == value
    assert read_canonical(canonical(read), "it", 1_000_000) == value


@settings(max_examples=200, deadline=2000, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_a_verification_of_anything_ends_in_a_report(data: st.DataObject) -> None:
    given = {
        "older_head": HONEST["note"][0],
        "policy": POLICY,
        "opening": HONEST["opening"][0],
        "detail": HONEST["detail"][0],
        "receipt": HONEST["receipt"][0],
    }
    name = data.draw(st.sampled_from(sorted(given)))
    given[name] = data.draw(damaged(given[name]) if data.draw(st.booleans()) else st.binary(max_size=100))
    receipt = given.pop("receipt")
    report = verify_receipt(receipt, SHOP.trust(), now=NOW, **given)
    assert len(report.checks) == 11
    assert (report.level is None) == (report.exit_code == 3)
    assert "\x1b" not in "".join(report.lines())
    if report.level is not None:
        assert not report.failed


@quick
@given(data=st.data())
def test_a_leaf_of_anything_ends_in_a_report(data: st.DataObject) -> None:
    """Signed by the operator, in the log, and still anything at all."""
    index = data.draw(st.integers(0, len(SHOP.leaves) - 1))
    honest = SHOP.leaves[index]
    forged = MAKE.Operator()
    forged.leaves = list(SHOP.leaves)
    forged.leaves[index] = data.draw(st.one_of(altered(honest), damaged(honest)))[:65_535]

    class Memory:
        def read(self, name: str, limit: int) -> bytes | None:
            if name == "checkpoint":
                return bytes(forged.head())
            if name.startswith("tile/entries/"):
                return b"".join(len(leaf).to_bytes(2, "big") + leaf for leaf in forged.leaves)
            return None

    report = verify_receipt(forged.receipt(MAKE.RECEIPT), forged.trust(), now=NOW, export=Memory())
    assert len(report.checks) == 11


HOSTILE = {
    "nesting": b"[" * 900_000,
    "objects": b'{"a":' * 200_000,
    "a long number": b"9" * 900_000,
    "many keys": b"{" + b",".join(b'"%d":1' % i for i in range(60_000)) + b"}",
    "lines": b"\n" * 400_000,
    "signatures": b"x\n\n" + "— a YWFhYWE=\n".encode() * 20_000,
    "spaces": b" " * 900_000,
    "groups": b"".join(b"group g%d any g%d\n" % (i, i - 1) for i in range(10_000)),
    "quotes": b'"' * 900_000,
    "base64": b"A" * 900_000,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_bytes_take_no_longer_than_others(name: str) -> None:
    import time

    begun = time.perf_counter()
    for _, read in HONEST.values():
        ours_or_fine(read, HOSTILE[name])
    assert time.perf_counter() - begun < 5


# The small pieces, against the patterns that say what they are.

DIGEST = re.compile(r"[0-9a-f]{64}")
DECIMAL = re.compile(r"0|[1-9][0-9]{0,18}")
THRESHOLD = re.compile(r"0|[1-9][0-9]{0,5}")
MOMENT = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}Z")
VKEY = re.compile(r"([^+\s]+)\+([0-9a-f]{8})\+([A-Za-z0-9+/=]{1,100})")
POLICY_BYTES = re.compile(rb"[\t\n\x20-\x7e\x80-\xff]*")

# Letters that look like digits, or that some call space, or that strip and split would lose.
ODD = st.text("019afgAFTZ-:+/= \t\n\r\x00\x1c\x85\u00a0\u2028\u0661\u00b2\uff10\ud800—_", max_size=3)
pieces = settings(max_examples=400, deadline=2000, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def nearly(draw: st.DrawFn, pattern: "re.Pattern[str]") -> str:
    """Return a text of a pattern, or one with something cut from it or put into it."""
    text = draw(st.from_regex(pattern, fullmatch=True))
    if draw(st.booleans()):
        return text
    start = draw(st.integers(0, len(text)))
    return text[:start] + draw(ODD) + text[start + draw(st.integers(0, 2)) :]


def complaint(read: Callable[[str, str], object], text: str) -> str:
    """Return what is said against a text; nothing when it is taken."""
    try:
        read(text, "it")
    except VerificationError as error:
        return str(error)
    return ""


@pieces
@given(text=st.one_of(nearly(DIGEST), st.text(max_size=70)))
def test_digests_are_what_their_pattern_says(text: str) -> None:
    fits = DIGEST.fullmatch(text) is not None
    assert is_digest(text) is fits
    assert (complaint(read_digest, text) == "") is fits
    if fits:
        assert read_digest(text, "it") == bytes.fromhex(text)


@pieces
@given(text=st.one_of(nearly(DECIMAL), st.integers(2**63 - 3, 2**63 + 3).map(str), st.text(max_size=5)))
def test_decimal_numbers_are_what_their_pattern_says(text: str) -> None:
    fits = DECIMAL.fullmatch(text) is not None and int(text) < 2**63
    assert (complaint(read_decimal, text) == "") is fits
    assert is_decimal(text, 6) is (THRESHOLD.fullmatch(text) is not None)


@pieces
@given(text=st.one_of(nearly(MOMENT), st.datetimes().map(lambda at: at.strftime("%Y-%m-%dT%H:%M:%SZ").zfill(20))))
def test_moments_are_what_their_pattern_and_the_calendar_say(text: str) -> None:
    said = complaint(read_moment, text)
    assert ("is not a moment like" in said) is (MOMENT.fullmatch(text) is None)
    if MOMENT.fullmatch(text):
        parts = [int(part) for part in re.split("[-T:Z]", text[:-1])]
        try:
            expected = datetime(*parts, tzinfo=UTC)  # type: ignore[misc,arg-type]
        except ValueError:
            assert "is not a moment of the calendar" in said
        else:
            assert read_moment(text, "it") == expected


@pieces
@given(text=st.one_of(nearly(VKEY), st.text(max_size=20), st.just("a" * 990 + "+01234567+AA==")))
def test_vkeys_are_what_their_pattern_says(text: str) -> None:
    said = complaint(lambda given, _: read_vkey(given), text)
    assert (said == "a vkey is name+id+base64") is (len(text) > 1000 or VKEY.fullmatch(text) is None)


@pieces
@given(data=st.one_of(st.binary(max_size=12), st.binary(max_size=200).map(base64.b64encode)), odd=ODD)
def test_base64_is_what_the_standard_library_says_in_its_one_spelling(data: bytes, odd: str) -> None:
    for text in (data.decode("latin-1"), data.decode("latin-1") + odd):
        try:
            value = base64.b64decode(text.encode("ascii"), validate=True)
            expected = value if base64.b64encode(value) == text.encode() else None
        except ValueError:
            expected = None
        assert (complaint(read_base64, text) == "") is (expected is not None)
        if expected is not None:
            assert read_base64(text, "it") == expected


@pieces
@given(data=st.binary(max_size=8))
def test_a_policy_holds_no_control_characters(data: bytes) -> None:
    said = complaint(lambda given, _: read_policy(given.encode("latin-1")), data.decode("latin-1"))
    assert (said == "the policy holds a control character") is (POLICY_BYTES.fullmatch(data) is None)


def test_sha256_is_the_same_with_and_without_openssl() -> None:
    built_in = pytest.importorskip("_sha2" if sys.version_info >= (3, 12) else "_sha256")
    for size in (0, 1, 55, 56, 63, 64, 65, 1000, 100_000):
        data = bytes(range(256)) * (size // 256 + 1)
        assert built_in.sha256(data[:size]).digest() == hashlib.sha256(data[:size]).digest()
