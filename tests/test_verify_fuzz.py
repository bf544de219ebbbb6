"""Whatever bytes come in, the verifier answers with a report or an error of ours, and soon."""

import importlib.util
import json
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
from unlearnd.verify.exports import MAX_DETAIL, read_bundle
from unlearnd.verify.notes import check_cosignatures, check_note, read_note, read_tree_head, read_vkey
from unlearnd.verify.policies import read_policy
from unlearnd.verify.proofs import read_proof
from unlearnd.verify.receipts import read_detail, read_opening, read_receipt
from unlearnd.verify.statements import canonical, read_canonical, read_json, read_statement
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
