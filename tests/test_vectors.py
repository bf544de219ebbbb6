"""The public conformance vectors, against the verifier.

They lie outside the project, in `shared/vectors` (its README says where each is from); tests that need them skip where
they are missing. What the RFCs print stands here as constants, so that the suite means something without them.
"""

import base64
import hashlib
import itertools
import json
import struct
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from unlearnd.errors import (
    FormatError,
    InclusionError,
    NotFoundError,
    RefusedError,
    SignatureError,
    VerificationError,
)
from unlearnd.verify.ed25519 import check_public_key, is_signed
from unlearnd.verify.envelopes import pae, read_envelope, signers_of
from unlearnd.verify.exports import read_bundle, tile_path
from unlearnd.verify.notes import (
    COSIGNATURE,
    ED25519,
    NoteKey,
    NoteSignature,
    check_note,
    cosignature_time,
    cosigned_message,
    read_note,
    read_tree_head,
    read_vkey,
)
from unlearnd.verify.policies import read_policy
from unlearnd.verify.proofs import read_proof
from unlearnd.verify.statements import canonical, read_canonical, read_json
from unlearnd.verify.trees import (
    EMPTY_ROOT,
    check_consistency,
    check_inclusion,
    leaf_hash,
    node_hash,
    root_of_leaves,
)
from unlearnd.witness import Update, cosign, read_key, read_update

VECTORS = Path(__file__).parents[2] / "shared" / "vectors"
vectors = pytest.mark.skipif(not VECTORS.is_dir(), reason="the public vectors in shared/vectors are not here")

RFC6962_LEAVES = ["", "00", "10", "2021", "3031", "40414243", "5051525354555657", "606162636465666768696a6b6c6d6e6f"]
RFC6962_ROOTS = [
    "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
    "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d",
    "fac54203e7cc696cf0dfcb42c92a1d9dbaf70ad9e621f4bd8d98662f00e3c125",
    "aeb6bcfe274b70a14fb067a5e5578264db0fa9b51af5e0ba159158f329e06e77",
    "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",
    "4e3bbb1f7b478dcfe71fb631631519a3bca12c9aefca1612bfce4c13a86264d4",
    "76e67dadbcdf1e10e1b74ddc608abd2f98dfb16fbce75277b5232a127f2087ef",
    "ddb89be403809e325750d3d263cd78929c2942b7942a34b77e122c9594a74c8c",
    "5dc9da79a70659a9ad559cb701ded9a2ab9d823aad2f4960cfe370eff4604328",
]
# RFC 8032, section 7.1: public key, message, signature.
RFC8032 = [
    (
        "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a",
        "",
        "e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e065224901555fb8821590a33bacc61e39701cf9b46bd25bf5f0595bbe246"
        "55141438e7a100b",
    ),
    (
        "3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c",
        "72",
        "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da085ac1e43e15996e458f3613d0f11d8c387b2eaeb4302aeeb"
        "00d291612bb0c00",
    ),
    (
        "fc51cd8e6218a1a38da47ed00230f0580816ed13ba3303ac5deb911548908025",
        "af82",
        "6291d657deec24024827e69c3abe01a30ce548a284743a445e3680d7db5ac3ac18ff9b538d16f290ae67f760984dc6594a7c15e9716ed28dc"
        "027beceea1ec40a",
    ),
]
LARGEST = 130


def load(name: str) -> Any:
    return json.loads((VECTORS / name).read_text())


def unbase64(text: str) -> bytes:
    return base64.b64decode(text)


def hexes(values: Sequence[str]) -> list[bytes]:
    return [bytes.fromhex(value) for value in values]


# A naive tree, straight from the definitions of RFC 6962, section 2.1.


def split(count: int) -> int:
    """The largest power of two below `count`."""
    return 1 << (count - 1).bit_length() - 1


@cache
def naive_root(start: int, end: int) -> bytes:
    """The root over the one-byte leaves `start` to `end`."""
    if start == end:
        return hashlib.sha256().digest()
    if end - start == 1:
        return hashlib.sha256(b"\x00" + bytes([start])).digest()
    k = split(end - start)
    return hashlib.sha256(b"\x01" + naive_root(start, start + k) + naive_root(start + k, end)).digest()


def naive_path(index: int, start: int, end: int) -> list[bytes]:
    if end - start == 1:
        return []
    k = split(end - start)
    if index < k:
        return [*naive_path(index, start, start + k), naive_root(start + k, end)]
    return [*naive_path(index - k, start + k, end), naive_root(start, start + k)]


def naive_consistency(old: int, start: int, end: int, whole: bool = True) -> list[bytes]:
    if old == end - start:
        return [] if whole else [naive_root(start, end)]
    k = split(end - start)
    if old <= k:
        return [*naive_consistency(old, start, start + k, whole), naive_root(start + k, end)]
    return [*naive_consistency(old - k, start + k, end, False), naive_root(start, start + k)]


class TestTrees:
    def test_roots_printed_for_the_reference_tree(self) -> None:
        assert EMPTY_ROOT.hex() == RFC6962_ROOTS[0]
        for size, root in enumerate(RFC6962_ROOTS):
            assert root_of_leaves(hexes(RFC6962_LEAVES[:size])).hex() == root

    def test_roots_up_to_130_leaves_are_those_of_the_definition(self) -> None:
        for size in range(LARGEST + 1):
            assert root_of_leaves(bytes([i]) for i in range(size)) == naive_root(0, size)

    def test_every_inclusion_proof_up_to_130_leaves_holds_and_no_other_length_does(self) -> None:
        for size in range(1, LARGEST + 1):
            root = naive_root(0, size)
            for index in range(size):
                path, leaf = naive_path(index, 0, size), naive_root(index, index + 1)
                check_inclusion(index, size, leaf, path, root)
                for wrong in ([*path, root], path[:-1] if path else [leaf], [root, *path]):
                    with pytest.raises(InclusionError):
                        check_inclusion(index, size, leaf, wrong, root)

    def test_every_consistency_proof_up_to_130_leaves_holds_and_no_other_length_does(self) -> None:
        for size in range(1, LARGEST + 1):
            root = naive_root(0, size)
            for old in range(1, size + 1):
                proof = naive_consistency(old, 0, size)
                check_consistency(old, size, naive_root(0, old), root, proof)
                for wrong in ([*proof, root], proof[:-1] if proof else [root]):
                    with pytest.raises(InclusionError):
                        check_consistency(old, size, naive_root(0, old), root, wrong)

    def test_a_proof_holds_for_its_own_index_and_size_only(self) -> None:
        for size, other in itertools.product(range(1, 20), repeat=2):
            for index, elsewhere in itertools.product(range(size), range(other)):
                if (index, size) != (elsewhere, other):
                    leaf, path = naive_root(index, index + 1), naive_path(index, 0, size)
                    with pytest.raises(InclusionError):
                        check_inclusion(elsewhere, other, leaf, path, naive_root(0, other))

    def test_consistency_from_the_empty_tree_is_refused(self) -> None:
        with pytest.raises(InclusionError):
            check_consistency(0, 5, EMPTY_ROOT, naive_root(0, 5), [])

    @vectors
    def test_reference_tree(self) -> None:
        given = load("merkle/rfc6962_roots.json")
        leaves = hexes(given["leaf_inputs_hex"])
        assert [root_of_leaves(leaves[:n]).hex() for n in range(9)] == given["roots_by_size_hex"]
        level = [leaf_hash(leaf) for leaf in leaves]
        for expected in given["node_hashes_hex"]:
            assert [node.hex() for node in level] == expected
            level = [node_hash(level[i], level[i + 1]) for i in range(0, len(level) - 1, 2)]

    @vectors
    def test_98_inclusion_probes(self) -> None:
        cases = load("merkle/inclusion_probes.json")["cases"]
        assert len(cases) == 98
        for case in cases:
            path = [unbase64(value) for value in case["proof"] or []]
            given = (case["leafIdx"], case["treeSize"], unbase64(case["leafHash"]), path, unbase64(case["root"]))
            assert holds(check_inclusion, *given) is not case["wantErr"], case["id"]

    @vectors
    def test_98_consistency_probes(self) -> None:
        cases = load("merkle/consistency_probes.json")["cases"]
        assert len(cases) == 98
        for case in cases:
            if case["id"] == "consistency/additional/sizes-are-equal-one-and-proof-is-empty":
                continue  # its roots have 12 bytes; see the README of the vectors
            proof = [unbase64(value) for value in case["proof"] or []]
            roots = (unbase64(case["root1"] or ""), unbase64(case["root2"] or ""))
            given = (case["size1"], case["size2"], *roots, proof)
            assert holds(check_consistency, *given) is not case["wantErr"], case["id"]

    @vectors
    def test_sums_over_every_proof(self) -> None:
        sums = load("merkle/accumulated.json")["derived_by_us"]
        lines: dict[str, list[str]] = {"roots": [], "inclusion": [], "consistency": []}

        def add(kind: str, *parts: object) -> None:
            lines[kind].append(" ".join(str(part) for part in parts) + "\n")

        for n in range(LARGEST + 1):
            add("roots", n, naive_root(0, n).hex())
            for i in range(n):
                add("inclusion", i, n, *(value.hex() for value in naive_path(i, 0, n)))
            for m in range(1, n + 1):
                add("consistency", m, n, *(value.hex() for value in naive_consistency(m, 0, n)))
        for kind, text in lines.items():
            assert hashlib.sha256("".join(text).encode()).hexdigest() == sums[kind]["sha256"], kind

    @vectors
    def test_leaf_of_go(self) -> None:
        given = load("tlog/go_tree_text.json")
        assert leaf_hash(given["record"].encode()) == unbase64(given["leaf_hash_b64"])
        head = read_tree_head(given["tree_text"])
        assert (head.origin, head.size) == ("go.sum database tree", 123456789012)


def holds(check: Any, *given: Any) -> bool:
    try:
        check(*given)
    except InclusionError:
        return False
    return True


class TestTiles:
    @vectors
    def test_paths(self) -> None:
        for path, tile in load("tlog/tile_paths.json")["go_height_form"]:
            if tile:
                height, level, number, width = tile
                ours = tile_path(level, number, 256 if width == 1 << height else width)
                assert ours.removeprefix("tile/") == path.removeprefix(f"tile/{height}/")

    @vectors
    def test_the_tessera_log(self) -> None:
        log = load("tlog/tessera_testlog.json")
        key = read_vkey(log["vkey"])
        entries = read_bundle(bytes.fromhex(log["entries_bundle_hex"]), 15)
        hashes = bytes.fromhex(log["tile_level0_hex"])
        assert [leaf_hash(entry) for entry in entries] == [hashes[i : i + 32] for i in range(0, len(hashes), 32)]
        assert len(log["checkpoints"]) == 16
        for size, text in log["checkpoints"].items():
            note = read_note(text.encode())
            assert check_note(note, [key]) == (key,)
            head = read_tree_head(note.text)
            assert (head.origin, head.size) == (log["origin"], int(size))
            assert head.root == root_of_leaves(entries[: head.size])

    @pytest.mark.parametrize("damage", [b"", b"\x00", b"\x00\x05abc", b"\x00\x01a\x00", b"\x00\x01a\x00\x01b\x00\x00"])
    def test_a_damaged_bundle_is_refused(self, damage: bytes) -> None:
        with pytest.raises(FormatError):
            read_bundle(damage, 2)


@vectors
class TestNotes:
    def test_all_open_cases(self) -> None:
        cases = load("tlog/signed_note.json")["cases"]
        assert len(cases) == 19
        for case in cases:
            keys = [read_vkey(key) for key in case["keys"]]
            try:
                signers = check_note(read_note(unbase64(case["msg_b64"])), keys)
            except VerificationError:
                assert case["want"] == "reject", case["id"]
            else:
                assert case["want"] == "ok", case["id"]
                assert len(signers) == case["verified_signatures"] if "verified_signatures" in case else signers

    def test_vkeys(self) -> None:
        given = load("tlog/signed_note.json")["vkeys"]
        for text in given["good"]:
            assert read_vkey(text).vkey == text
        peter = given["good"][0]
        parts = {peter[i:j] for i in range(len(peter)) for j in range(i, len(peter) + 1)} - {peter}
        raised = {peter[:i] + chr(ord(peter[i]) + 1) + peter[i + 1 :] for i in range(len(peter))}
        for text in [*given["bad"], *parts, *raised]:
            with pytest.raises(FormatError):
                read_vkey(text)

    def test_a_signature_line_is_the_published_one(self) -> None:
        given = load("tlog/signed_note.json")["sign"]
        key = read_key(given["skey"])
        public = NoteKey(key.name, ED25519, key.public.public)
        line = NoteSignature(key.name, public.id, key.sign(given["text"].encode())).line
        assert line == given["signature_line"]

    def test_tree_heads(self) -> None:
        given = load("tlog/checkpoint_body.json")
        for case in [*given["upstream_lenient"], *given["from_spec_text_by_us"]]:
            wanted = bool(case["want"]) and not case.get("short_root")
            if case["id"] in ("valid different origin", "valid extension line"):
                wanted = len(unbase64(case["body"].split("\n")[2])) == 32
            try:
                read_tree_head(case["body"])
            except FormatError:
                assert not wanted, case["id"]
            else:
                assert wanted, case["id"]

    def test_cosignatures(self) -> None:
        given = load("tlog/cosignature.json")
        note = read_note(given["parse_only"]["note"].encode())
        for line, expected in zip(note.signatures, given["parse_only"]["expect"], strict=True):
            assert (line.name, line.key_id.hex()) == (expected["name"], expected["key_id"])
            assert len(line.signature) == expected["sig_len"]
            if "timestamp" in expected:
                assert cosignature_time(line.signature) == expected["timestamp"]
        message = given["signed_message_for_timestamp"]
        assert cosigned_message(note.text, message["timestamp"]) == message["message"].encode()
        for case in given["timestamp_of_signature"]:
            signature = unbase64(case["sig_b64"])[4:]
            if "reject" in case:
                with pytest.raises(SignatureError):
                    cosignature_time(signature)
            else:
                assert cosignature_time(signature) == case["timestamp"]
        key = read_vkey(given["vkey_type4_good"], cosigner=True)
        assert key.algorithm == COSIGNATURE
        assert key.vkey == given["vkey_type4_good"]
        with pytest.raises(FormatError):
            read_vkey(given["vkey_type4_good"])

    def test_proofs(self) -> None:
        given = load("tlog/tlog_proof.json")
        for case in given["marshal"]:
            proof = read_proof(case["text"].encode())
            assert proof.index == case["index"]
            assert proof.path == tuple(map(unbase64, case["hashes"]))
            assert proof.note == case["checkpoint"].encode()
            assert proof.extra == (unbase64(case["extra_b64"]) if "extra_b64" in case else None)
        for text in given["reject"]:
            with pytest.raises(FormatError):
                read_proof(text.encode())

    def test_policies(self) -> None:
        given = load("tlog/tlog_policy.json")
        both, either, none = (read_policy(text.encode()) for text in given["good"])
        w1, w2 = both.witnesses.values()
        assert [both.is_met_by(keys) for keys in ([], [w1], [w2], [w1, w2])] == [False, False, False, True]
        assert [either.is_met_by(keys) for keys in ([], [w1], [w2], [w1, w2])] == [False, True, True, True]
        assert none.quorum is None
        for text in given["reject"].values():
            with pytest.raises(FormatError):
                read_policy(text.encode())


@vectors
class TestWitness:
    """Who is asked to cosign what, in the order of the published scenarios."""

    KEY = "PRIVATE+KEY+PeterNeumann+c74f20a3+AYEKFALVFGyNhPJEMzD1QIDr+Y7hfZx09iUvxdXHKDFz"

    def status(self, state: Path, log_key: NoteKey, update: Update) -> int:
        """What a witness on the network would answer."""
        try:
            cosign(state, read_key(self.KEY), [log_key], update, 1_700_000_000)
        except NotFoundError:
            return 404
        except RefusedError:
            return 409
        except (SignatureError, FormatError):
            return 403
        except InclusionError:
            return 422
        return 200

    def test_torchwood_scenario(self, tmp_path: Path) -> None:
        given = load("tlog/witness_scenario.json")
        key = NoteKey(given["log_origin"], ED25519, bytes.fromhex(given["log_public_key_hex"]))
        answers = []
        for step in given["steps"]:
            body = step["request_body"].encode()
            try:
                answers.append(self.status(tmp_path / "state", key, read_update(body)))
            except FormatError:
                answers.append(403)
        assert answers == [step["status"] for step in given["steps"]]

    def test_update_of_transparency_dev(self, tmp_path: Path) -> None:
        given = load("tlog/witness_update.json")
        key = read_vkey(given["log_vkey"])
        five, eight = given["checkpoint_5"].encode(), given["checkpoint_8"].encode()
        proof = tuple(hexes(given["consistency_5_8_hex"]))

        def ask(name: str, *updates: Update) -> int:
            return [self.status(tmp_path / name, key, update) for update in (Update(five), *updates)][-1]

        assert ask("good", Update(eight, 5, proof)) == 200
        assert ask("stale", Update(eight, 2, proof)) == 409
        assert ask("back", Update(eight, 5, proof), Update(five)) == 422
        assert ask("short", Update(eight, 5, (b"\x01\x02",) * 4)) == 422
        assert ask("same", Update(five)) == 200
        assert ask("same", Update(five, 5, ())) == 200
        assert ask("none", Update(eight)) == 409


class TestEnvelopes:
    def test_pre_authentication_encoding(self) -> None:
        assert pae("http://example.com/HelloWorld", b"hello world") == (
            b"DSSEv1 29 http://example.com/HelloWorld 11 hello world"
        )

    @vectors
    def test_pae_vectors_and_the_ecdsa_example(self) -> None:
        from cryptography.hazmat.primitives.asymmetric import ec, utils
        from cryptography.hazmat.primitives.hashes import SHA256

        given = load("dsse/dsse_spec.json")
        for case in given["pae"]:
            assert pae(case["type"], bytes.fromhex(case["body_hex"])).hex() == case["pae_hex"]
        example = given["ecdsa_p256_sha256"]
        envelope = read_envelope(example["envelope"])
        key = ec.EllipticCurvePublicNumbers(int(example["x"]), int(example["y"]), ec.SECP256R1()).public_key()
        r, s = (int.from_bytes(half) for half in (envelope.signatures[0][:32], envelope.signatures[0][32:]))
        message = pae(envelope.payload_type, envelope.payload)
        key.verify(utils.encode_dss_signature(r, s), message, ec.ECDSA(SHA256()))

    @vectors
    def test_an_openssf_model_signature(self) -> None:
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.hazmat.primitives.hashes import SHA384
        from cryptography.hazmat.primitives.serialization import load_pem_public_key

        folder = VECTORS / "model_signing"
        pem = (folder / "signing-key-pub.pem").read_bytes()
        key = load_pem_public_key(pem[pem.index(b"-----BEGIN") :])
        assert isinstance(key, ec.EllipticCurvePublicKey)
        bundle = read_json((folder / "v1.1.0-elliptic-key" / "model.sig").read_bytes(), "the bundle", 10_000)
        envelope = read_envelope(bundle["dsseEnvelope"])
        message = pae(envelope.payload_type, envelope.payload)
        # The signer hashes with the curve's own size.
        key.verify(envelope.signatures[0], message, ec.ECDSA(SHA384()))
        assert read_json(envelope.payload, "the payload", 10_000)["_type"] == "https://in-toto.io/Statement/v1"

    def test_both_alphabets_are_read_and_no_third(self) -> None:
        payload, signature = b"\xfb\xff\xfe", b"\xff" * 64
        for encode in (base64.b64encode, base64.urlsafe_b64encode):
            entry = {"sig": encode(signature).decode(), "unknown": 1}
            value = {"payloadType": "t", "payload": encode(payload).decode(), "signatures": [entry], "unknown": {}}
            envelope = read_envelope(value)
            assert (envelope.payload, envelope.signatures) == (payload, (signature,))
        for wrong in ("+/-_", "Y Q==", "YQ=", "YR==", "YQ==\n", "é"):
            with pytest.raises(FormatError):
                read_envelope({"payloadType": "t", "payload": wrong, "signatures": [{"sig": "YQ=="}]})

    def test_the_same_key_counts_once(self) -> None:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        key = Ed25519PrivateKey.generate()
        signature = base64.b64encode(key.sign(pae("t", b"x"))).decode()
        value = {"payloadType": "t", "payload": "eA==", "signatures": [{"sig": signature}, {"sig": signature}]}
        public = key.public_key().public_bytes_raw()
        assert signers_of(read_envelope(value), [public]) == (public,)
        with pytest.raises(SignatureError):
            signers_of(read_envelope(value), [bytes.fromhex(RFC8032[0][0])])


class TestCanonicalJson:
    def test_what_rfc_8785_prints(self) -> None:
        # Section 3.2.2: strings and literals; its numbers are floats, which are refused here.
        printed = b'{"literals":[null,true,false],"string":"\xe2\x82\xac$\\u000f\\nA\'B\\"\\\\\\\\\\"/"}'
        given = (
            rb'{"string": "\u20ac$\u000F\u000aA' + rb"'" + rb'\u0042\u0022\u005c\\\"\/", "literals": [null,true,false]}'
        )
        assert canonical(read_json(given, "it", 1000)) == printed
        assert read_canonical(printed, "it", 1000)["literals"] == [None, True, False]
        with pytest.raises(FormatError, match="not canonical"):
            read_canonical(given, "it", 1000)

    REFUSED = (
        *(b"1.0", b"1e3", b"-0.0", b"NaN", b"Infinity", b"-Infinity", b"9007199254740992", b"-9007199254740992"),
        *(b"1" * 5000, b'{"a":1,"a":2}', b'{"a":1,"\\u0061":2}', b'"\\ud800"', b'{"\\udc00":1}', '{"é":1}'.encode()),
        *(
            b'"\xff"',
            b"\xef\xbb\xbf1",
            "1".encode("utf-16"),
            b"",
            b"[1",
            b"'a'",
            b'"\t"',
            b"[" * 100_000,
            b'{"a":' * 50_000,
        ),
        *(b"01", b"+1", b"[1,]", b"1 2", b"// 1\n1", b'"\\x41"'),
    )

    @pytest.mark.parametrize("text", REFUSED, ids=lambda text: repr(text[:20]))
    def test_what_can_be_read_in_two_ways_is_refused(self, text: bytes) -> None:
        with pytest.raises(FormatError):
            read_json(text, "it", 1_000_000)

    @pytest.mark.parametrize("text", [b'{"b":1,"a":2}', b"[1, 2]", b" 1", b"1\n", b'"\\u0041"', b'"\\/"', b"-0"])
    def test_a_second_spelling_is_not_canonical(self, text: bytes) -> None:
        read_json(text, "it", 100)
        with pytest.raises(FormatError, match="not canonical"):
            read_canonical(text, "it", 100)

    @vectors
    def test_published_cases_of_our_kind_of_values(self) -> None:
        read = []
        for case in load("jcs/rfc8785_cases.json")["cases"]:
            try:
                value = read_json(unbase64(case["input_b64"]), "it", 10_000)
            except FormatError:
                continue
            assert canonical(value) == unbase64(case["output_b64"])
            assert read_canonical(unbase64(case["output_b64"]), "it", 10_000) == value
            read.append(case["id"])
        # The others have floats, or keys outside ASCII.
        assert read == ["arrays", "unicode"]

    @vectors
    def test_the_package_that_writes_agrees_with_the_published_cases(self) -> None:
        rfc8785 = pytest.importorskip("rfc8785", reason="the writer's canonical JSON package is not installed")
        for case in load("jcs/rfc8785_cases.json")["cases"]:
            assert rfc8785.dumps(json.loads(unbase64(case["input_b64"]))) == unbase64(case["output_b64"])
        for line in (VECTORS / "jcs" / "es6_numbers_1000.txt").read_text().splitlines():
            bits, expected = line.split(",")
            number = struct.unpack(">d", bytes.fromhex(bits.zfill(16)))[0]
            assert rfc8785.dumps(number).decode() == expected


class TestEd25519:
    def test_signatures_printed_in_rfc_8032(self) -> None:
        for public, message, signature in RFC8032:
            key, text, signed = map(bytes.fromhex, (public, message, signature))
            check_public_key(key)
            assert is_signed(key, signed, text)
            assert not is_signed(key, signed, text + b"!")
            assert not is_signed(key, signed[:-1], text)

    @vectors
    def test_rfc_8032_vectors(self) -> None:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        given = load("ed25519/rfc8032.json")["vectors"]
        assert len(given) == 5
        for case in given:
            seed, public, message, signature = (
                bytes.fromhex(case[name]) for name in ("seed", "public", "message", "signature")
            )
            check_public_key(public)
            assert is_signed(public, signature, message)
            assert Ed25519PrivateKey.from_private_bytes(seed).sign(message) == signature

    @vectors
    def test_wycheproof(self) -> None:
        given = load("ed25519/wycheproof.json")["tests"]
        assert len(given) == 151
        for case in given:
            key, message, signature = (bytes.fromhex(case[name]) for name in ("pk", "msg", "sig"))
            assert is_signed(key, signature, message) is (case["result"] == "valid"), case["id"]

    @vectors
    def test_edge_keys_are_refused_when_they_enter(self) -> None:
        given = load("ed25519/cctv_edges.json")["vectors"]
        for case in given:
            flags = set(case["flags"] or ())
            unfit = bool(flags & {"low_order_A", "non_canonical_A"})
            try:
                check_public_key(bytes.fromhex(case["key"]))
            except FormatError:
                assert unfit, case["number"]
            else:
                assert not unfit, case["number"]

    @pytest.mark.parametrize(
        "key",
        [
            "00" * 32,
            "01" + "00" * 31,
            "01" + "00" * 30 + "80",
            "ec" + "ff" * 30 + "7f",
            "26e8958fc2b227b045c3f489f298eff0d5dfac05d3c63339b13802886d53fc05",
            "26e8958fc2b227b045c3f489f298eff0d5dfac05d3c63339b13802886d53fc85",
            "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a",
            "ed" + "ff" * 30 + "7f",
            "ee" + "ff" * 30 + "ff",
            "ff" * 32,
            "02" + "00" * 31,  # not on the curve
            "00" * 31,
        ],
    )
    def test_a_key_of_low_order_or_of_no_point_is_refused(self, key: str) -> None:
        with pytest.raises(FormatError):
            check_public_key(bytes.fromhex(key))
