"""Check a receipt, as far as what an auditor brings along allows.

Each check stands alone: it passes, fails, or says what it would need. What could not be looked at never counts
as fine. No store, no database, no network; the clock is an argument.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from unlearnd.errors import FormatError, InclusionError, SignatureError, VerificationError
from unlearnd.verify.envelopes import signers_of
from unlearnd.verify.hashes import sha256
from unlearnd.verify.notes import Cosignature, Note, NoteKey, TreeHead, check_cosignatures, check_note
from unlearnd.verify.policies import Policy, count_of, read_policy
from unlearnd.verify.proofs import Proof, read_proof
from unlearnd.verify.receipts import (
    MAX_DETAIL,
    PAYLOAD_TYPE,
    Detail,
    Erasure,
    Receipt,
    lists_of,
    read_detail,
    read_erasure,
    read_opening,
    read_receipt,
)
from unlearnd.verify.reports import TITLES, Check, Report, Result
from unlearnd.verify.statements import read_statement
from unlearnd.verify.texts import show_moment
from unlearnd.verify.trees import check_inclusion, leaf_hash
from unlearnd.verify.trust import Trust, check_head, read_head, read_trust
from unlearnd.verify.values import Value

if TYPE_CHECKING:
    from unlearnd.verify.exports import Folder
    from unlearnd.verify.logs import Log

T = TypeVar("T")
MAX_SENTENCE = 500


def verify_receipt(
    receipt: bytes,
    trust: bytes,
    *,
    now: datetime,
    older_head: bytes | None = None,
    policy: bytes | None = None,
    export: Folder | None = None,
    opening: bytes | None = None,
    detail: bytes | None = None,
) -> Report:
    """Return what can be said of a receipt; raise FormatError only when the trust file cannot be used.

    `older_head` is a tree head kept from earlier, `policy` a C2SP tlog-policy that replaces the witnesses of the
    trust file, `export` an exported log, `opening` what the user was given, `detail` the detail document (else it
    is taken from the export).
    """
    try:
        trusted = read_trust(trust)
    except FormatError as error:
        raise FormatError(_printable(f"the trust file cannot be used: {error}")) from None
    evidence = _Evidence(receipt, trusted, older_head, policy, export, opening, detail, now)
    checks = {
        "R1": evidence.signature,
        "R2": evidence.form,
        "R3": evidence.inclusion,
        "R4": evidence.log_signature,
        "R5": evidence.quorum,
        "R6": evidence.dates,
        "L1": evidence.consistency,
        "L2": evidence.replay,
        "L3": evidence.same_log,
        "D0": evidence.opened,
        "D1": evidence.detailed,
    }
    results = tuple(_run(check_id, check) for check_id, check in checks.items())
    form_holds = results[1].result is Result.PASS
    return Report(results, evidence.about() if form_holds else {})


class _NotCheckedError(Exception):
    """A check lacks what it would need; the text says what."""


class _Part(Value, Generic[T]):
    """Something read, or why it could not be."""

    value: T | None
    error: VerificationError | None

    def get(self, otherwise: str) -> T:
        """Return the value; leave the check undone where another one reports the error."""
        if self.value is None:
            raise _NotCheckedError(otherwise)
        return self.value

    def get_or_fail(self) -> T:
        """Return the value or raise the error."""
        if self.error:
            raise self.error
        assert self.value is not None
        return self.value


class _Evidence:
    """What was brought along, read once."""

    def __init__(
        self,
        receipt: bytes,
        trust: Trust,
        older_head: bytes | None,
        policy: bytes | None,
        export: Folder | None,
        opening: bytes | None,
        detail: bytes | None,
        now: datetime,
    ) -> None:
        self._older_head, self._export, self._opening = older_head, export, opening
        self.receipt: _Part[Receipt] = _read(lambda: read_receipt(receipt))
        self.erasure: _Part[Erasure] = _read(self._read_erasure)
        self.proof: _Part[Proof] = _read(lambda: read_proof(self.receipt.get_or_fail().proof))
        self.head: _Part[tuple[Note, TreeHead]] = _read(lambda: read_head(self.proof.get_or_fail().note))
        self.policy: _Part[Policy] = _read(
            lambda: read_policy(policy) if policy is not None else count_of(trust.witnesses, trust.quorum)
        )
        self._policy_given = policy is not None
        self.older: _Part[tuple[Note, TreeHead]] = _read(lambda: read_head(older_head or b""))
        self._detail_given = detail is not None
        self._detail_bytes = detail
        self.detail: _Part[Detail] | None = self._find_detail()
        self.newest: _Part[tuple[Note, TreeHead]] = _read(self._read_newest)
        self.log: _Part[Log] = _read(lambda: self._read_log(trust, now))
        # Keys end where the log says so, even for an auditor whose trust file is older.
        self.trust = trust.ended(self.log.value.ends) if self.log.value else trust

    def about(self) -> dict[str, Any]:
        """Return what the receipt says of itself."""
        said = self.erasure.get_or_fail()
        return {
            "storeId": said.store_id,
            "requestId": said.request_id,
            "erasureId": said.erasure_id,
            "asked": said.asked,
            "found": said.found,
            "points": said.erased.count,
            "receivedAt": show_moment(said.received_at),
            "influenceRemovedAt": show_moment(said.influence_removed_at),
            "dueAt": show_moment(said.due_at),
            "replay": said.replay,
            **({"objectsKept": said.objects_kept.count} if said.objects_kept.count else {}),
        }

    # The receipt and the trust file.

    def signature(self) -> str:
        """R1: a receipt key valid at that index signed these bytes."""
        envelope = self.receipt.get("a receipt that can be read is needed (R2)").envelope
        index = self.proof.get("a proof that can be read is needed: it says at which leaf (R3)").index
        keys = self.trust.receipt_keys
        signers = signers_of(envelope, [key.public for key in keys])
        signed = [key for key in keys if key.public in signers]
        for key in signed:
            if index in key.span:
                return f"signed by receipt key {key.key_id[:12]}, valid at leaf {index}"
        key = signed[0]
        raise SignatureError(f"signed for leaf {index} by receipt key {key.key_id[:12]}, which is valid {key.span}")

    def form(self) -> str:
        """R2: canonical, of a known type, complete, bounded; and of this store."""
        self.receipt.get_or_fail()
        said = self.erasure.get_or_fail()
        if said.store_id != self.trust.store_id:
            raise FormatError("the receipt is of another store than the trust file")
        return "a canonical statement of an erasure by this store"

    def inclusion(self) -> str:
        """R3: the payload is leaf `index` of the tree head's tree."""
        payload = self.receipt.get("a receipt that can be read is needed (R2)").envelope.payload
        proof = self.proof.get_or_fail()
        _, head = self.head.get("a tree head that can be read is needed (R4)")
        check_inclusion(proof.index, head.size, leaf_hash(payload), proof.path, head.root)
        return f"leaf {proof.index} of a log of {head.size}"

    def log_signature(self) -> str:
        """R4: the tree head is signed by the log key for that origin."""
        self.proof.get("a proof that can be read is needed (R3)")
        note, head = self.head.get_or_fail()
        key = check_head(note, head, self.trust)
        return f"tree head of size {head.size} signed by log key {key.id.hex()} for {head.origin}"

    def quorum(self) -> str:
        """R5: others saw this same history."""
        policy = self.policy.get_or_fail()
        if policy.quorum is None:
            source = "the policy" if self._policy_given else "the trust file"
            raise _NotCheckedError(f"{source} asks for no witness; a policy file with witnesses is needed")
        note, _ = self.head.get("a tree head that can be read is needed (R4)")
        cosigned = self._cosignatures(policy, note)
        if policy.logs:
            check_note(note, policy.logs)
        if not policy.is_met_by(found.key for found in cosigned):
            names = ", ".join(found.key.name for found in cosigned) or "none"
            raise SignatureError(f"the witnesses that cosigned are not enough; they are: {names}")
        source = "the policy" if self._policy_given else "the trust file, which is the operator's,"
        return f"cosigned by {', '.join(found.key.name for found in cosigned)}, as {source} asks"

    def dates(self) -> str:
        """R6: received, removed and due in this order, the same as in the request's leaf, and not dated back."""
        said = self.erasure.get("a receipt of good form is needed (R2)")
        received, removed, due = map(show_moment, (said.received_at, said.influence_removed_at, said.due_at))
        if said.influence_removed_at < said.received_at:
            raise FormatError(f"influence is said to be removed {removed}, before the request was received {received}")
        if said.influence_removed_at > said.due_at:
            raise FormatError(f"influence was removed {removed}, and that was due {due}")
        sentence = f"received {received}, removed {removed}, due {due}"
        index = self.proof.get("a proof that can be read is needed: it says at which leaf (R3)").index
        if said.request_leaf >= index:
            raise FormatError(f"the request is said to be leaf {said.request_leaf}, and its receipt leaf {index}")
        log = self.log.value
        if log and log.leaf is not None:
            from unlearnd.verify.logs import CLOCKS_DIFFER, disagreement  # optional: only with an exported log

            problem = disagreement(
                log.requests.get(said.request_leaf),
                index,
                (said.request_id, said.erasure_id, said.asked),
                (said.received_at, said.due_at),
            )
            if problem:
                raise InclusionError(problem)
            if log.latest and said.influence_removed_at + CLOCKS_DIFFER < log.latest:
                raise InclusionError(
                    f"removed {removed}, but a leaf before the receipt is of {show_moment(log.latest)}"
                )
            sentence += f"; the request is leaf {said.request_leaf} of the log"
        return sentence + self._outside_time(said)

    # The log, and what was kept of it.

    def consistency(self) -> str:
        """L1: the log extends the tree head that the auditor kept."""
        if self._older_head is None:
            raise _NotCheckedError("no earlier tree head was given, so a rewritten history would not be seen")
        note, older = self.older.get_or_fail()
        check_head(note, older, self.trust)
        if self._export is None:
            _, head = self.head.get("a tree head that can be read is needed (R4)")
            if older.size != head.size:
                raise _NotCheckedError(
                    f"the tree head kept has size {older.size}, the receipt's {head.size}: an exported log is needed"
                )
            if older.root != head.root:
                raise InclusionError(
                    f"the log has two different trees of size {older.size}: one was kept, one is shown"
                )
            return f"the receipt's tree head is the one that was kept, of size {older.size}"
        log = self._bound_log()
        if older.size > log.size:
            raise InclusionError(f"the log shown has {log.size} leaves, the tree head kept already {older.size}")
        if log.roots[older.size] != older.root:
            raise InclusionError(f"the first {older.size} leaves of the log are not those of the tree head kept")
        return f"the log of {log.size} leaves begins with the {older.size} of the tree head kept"

    def replay(self) -> str:
        """L2: all leaves hash to the root, and nothing in them is out of order, missing or overdue."""
        if self._export is None:
            raise _NotCheckedError("an exported log is needed")
        note, head = self.newest.get_or_fail()
        log = self.log.get_or_fail()
        check_head(note, head, self.trust)
        if log.root != head.root:
            raise InclusionError(f"the {log.size} leaves of the exported log do not hash to its signed root")
        if log.problems:
            more = f" (and {len(log.problems) - 1} more)" if len(log.problems) > 1 else ""
            raise InclusionError(log.problems[0] + more)
        return f"all {log.size} leaves hash to the signed root; every request answered once and in time, or not yet due"

    def same_log(self) -> str:
        """L3: the receipt's tree head is a prefix of this log, and its payload is that leaf."""
        if self._export is None:
            raise _NotCheckedError("an exported log is needed")
        payload = self.receipt.get("a receipt that can be read is needed (R2)").envelope.payload
        index = self.proof.get("a proof that can be read is needed (R3)").index
        _, head = self.head.get("a tree head that can be read is needed (R4)")
        log = self._bound_log()
        if head.size > log.size:
            raise _NotCheckedError(f"the exported log has {log.size} leaves: one of at least {head.size} is needed")
        if log.roots[head.size] != head.root:
            raise InclusionError(f"the receipt's tree head of size {head.size} is of another log than the one shown")
        if log.leaf != payload:
            raise InclusionError(f"leaf {index} of the log shown is not this receipt")
        return (
            f"the receipt is leaf {index} of the log shown, and its tree head of size {head.size} the beginning of it"
        )

    # What stands behind the receipt.

    def opened(self) -> str:
        """D0: this receipt is about the user of the opening."""
        if self._opening is None:
            raise _NotCheckedError("the opening that the user was given is needed to see whose receipt this is")
        said = self.erasure.get("a receipt of good form is needed (R2)")
        opening = read_opening(self._opening)
        if opening.request_id != said.request_id:
            raise FormatError("the opening is of another request than the receipt")
        if said.user_commitment is None:
            raise FormatError("the receipt is about a point and commits to no user")
        import hmac  # optional: only with an opening

        committed = hmac.digest(opening.nonce, b"unlearnd/user/v1\n" + opening.user.encode(), "sha256")
        if not hmac.compare_digest(committed.hex(), said.user_commitment):
            raise FormatError("the opening does not open the receipt's commitment: it is about another user")
        return "the opening opens the receipt's commitment: it is about that user"

    def detailed(self) -> str:
        """D1: the lists behind the roots are the ones shown, and agree with the log."""
        said = self.erasure.get("a receipt of good form is needed (R2)")
        if self.detail is None:
            raise _NotCheckedError(f"the detail document {said.detail_digest[:12]} is needed")
        detail = self.detail.get_or_fail()
        if detail.request_id != said.request_id:
            raise FormatError("the detail document is of another request")
        for name, listed in lists_of(detail).items():
            if listed != getattr(said, name):
                raise FormatError(f"the list {name.replace('_', ' ')} of the detail document is not the receipt's")
        retrain, scratch = (sum(entry[i] for entry in detail.models) for i in (4, 5))
        replay = "none" if any(entry[3] == "none" for entry in detail.models) else "bit-exact"
        if (retrain, scratch, replay) != (said.retrain, said.from_scratch, said.replay):
            raise FormatError("the models of the detail document do not add up to what the receipt says")
        gone = {(entry[0], entry[3]) for entry in detail.destroyed}
        if any((entry[0], entry[3]) in gone for entry in detail.serving):
            raise FormatError("the detail document has a checkpoint both destroyed and in service")
        counts = f"points erased: {len(detail.erased)}, slices touched: {len(detail.slices)}"
        counts += f", checkpoints destroyed: {len(detail.destroyed)}"
        sentence = f"{counts}; the lists are those of the receipt's roots"
        log = self.log.value
        if log and log.leaf is not None:
            self._check_detail_in_log(detail, log, said)
            sentence += ", and stand in the log"
        return sentence

    def _check_detail_in_log(self, detail: Detail, log: Log, said: Erasure) -> None:
        index = self.proof.get_or_fail().index
        for dataset, shard, slice_, _, before, after in detail.slices:
            logged = log.slice_roots.get((dataset, shard, slice_, before), index)
            if before and logged >= index:
                raise InclusionError(
                    f"no earlier leaf has the root that shard {shard}, slice {slice_} is said to have had"
                )
            if after and (dataset, shard, slice_, after) not in log.slice_roots:
                raise InclusionError(f"no leaf has the root that shard {shard}, slice {slice_} is said to have now")
        for model, shard, slice_, recipe, file, _ in detail.destroyed:
            entries = log.destroyed.get((model, recipe), [])
            if not any(e[0] < index and e[1:] == (said.erasure_id, shard, slice_, file) for e in entries):
                raise InclusionError(f"no leaf before the receipt says that the checkpoint {recipe[:12]} was destroyed")
        for model, _, _, recipe in detail.serving:
            if not recipe:
                continue
            built = [at for at in log.built.get((model, recipe), []) if at < index]
            if not built:
                raise InclusionError(
                    f"the checkpoint {recipe[:12]}, said to be in service, is built in no earlier leaf"
                )
            # One that was damaged, put away and trained anew has the same recipe: the last word counts.
            if any(max(built) < entry[0] < index for entry in log.destroyed.get((model, recipe), [])):
                raise InclusionError(f"the checkpoint {recipe[:12]}, said to be in service, was destroyed before")

    # Reading.

    def _read_erasure(self) -> Erasure:
        envelope = self.receipt.get_or_fail().envelope
        if envelope.payload_type != PAYLOAD_TYPE:
            raise FormatError(f"the payload is not of type {PAYLOAD_TYPE}")
        return read_erasure(read_statement(envelope.payload))

    def _find_detail(self) -> _Part[Detail] | None:
        """Return the detail document, given or found in the export; None when there is none.

        Size and digest are checked before it is parsed: only a document that the operator named is.
        """
        said = self.erasure.value
        if said is None:
            return None
        data = self._detail_bytes
        if data is None and self._export is not None:
            from unlearnd.verify import exports  # optional: only with an exported log

            folder = self._export
            found = _read(lambda: exports.read_detail(folder, said.detail_digest) or b"")
            if found.error:
                return _Part(None, found.error)
            data = found.value or None
        if data is None:
            return None
        document = data

        def read() -> Detail:
            if len(document) != said.detail_size or sha256(document).hexdigest() != said.detail_digest:
                raise FormatError("the detail document is not the one that the receipt names")
            return read_detail(document, MAX_DETAIL)

        return _read(read)

    def _read_newest(self) -> tuple[Note, TreeHead]:
        if self._export is None:
            raise FormatError("no exported log was given")
        from unlearnd.verify.exports import read_checkpoint  # optional: only with an exported log

        return read_head(read_checkpoint(self._export))

    def _read_log(self, trust: Trust, now: datetime) -> Log:
        _, newest = self.newest.get_or_fail()
        from unlearnd.verify.exports import read_leaves  # optional: only with an exported log
        from unlearnd.verify.logs import Asked, replay_log

        assert self._export is not None
        detail = self.detail.value if self.detail else None
        sizes = {part.value[1].size for part in (self.head, self.older) if part.value}
        asked = Asked(
            sizes=frozenset(sizes),
            leaf=self.proof.value.index if self.proof.value else None,
            slice_roots=frozenset((e[0], e[1], e[2], root) for e in detail.slices for root in e[4:])
            if detail
            else frozenset(),
            recipes=frozenset((e[0], e[3]) for e in (*detail.destroyed, *detail.serving)) if detail else frozenset(),
        )
        return replay_log(read_leaves(self._export, newest.size), trust, asked, now)

    def _bound_log(self) -> Log:
        """Return the log if its leaves are those of the tree head it comes with."""
        log = self.log.get("an exported log that can be read is needed (L2)")
        _, head = self.newest.get("an exported log that can be read is needed (L2)")
        if log.root != head.root:
            raise _NotCheckedError("an exported log whose leaves hash to its root is needed (L2)")
        return log

    def _cosignatures(self, policy: Policy, note: Note) -> tuple[Cosignature, ...]:
        own = {key.key.public for key in self.trust.log_keys} | {key.public for key in self.trust.receipt_keys}
        witnesses: list[NoteKey] = list(policy.witnesses.values())
        if any(key.public in own for key in witnesses):
            raise SignatureError("a witness has a key of the store itself, and nobody is their own witness")
        return check_cosignatures(note, witnesses)

    def _outside_time(self, said: Erasure) -> str:
        policy, head = self.policy.value, self.head.value
        if not policy or not head:
            return "; these are the operator's own dates"
        try:
            times = [found.time for found in self._cosignatures(policy, head[0])]
        except VerificationError:
            return "; these are the operator's own dates"
        if times and min(times) <= said.due_at.timestamp():
            return f"; a witness saw the receipt by {show_moment(datetime.fromtimestamp(min(times), UTC))}"
        return "; these are the operator's own dates"


def _read(read: Callable[[], T]) -> _Part[T]:
    try:
        return _Part(read(), None)
    except VerificationError as error:
        return _Part(None, error)


def _run(check_id: str, check: Callable[[], str]) -> Check:
    try:
        result, sentence = Result.PASS, check()
    except _NotCheckedError as lacking:
        result, sentence = Result.NOT_CHECKED, str(lacking)
    except VerificationError as error:
        result, sentence = Result.FAIL, str(error)
    return Check(check_id, TITLES[check_id], result, _printable(sentence))


def _printable(sentence: str) -> str:
    """Return a sentence that cannot move a terminal's cursor: names in it come from files that nobody vouches for."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in sentence[:MAX_SENTENCE])
