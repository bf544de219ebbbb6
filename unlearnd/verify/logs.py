"""Replay an exported log: hash every leaf, read every leaf, and hold them against each other.

One walk, leaf by leaf, keeping of each only what later ones refer to. What is wrong is collected rather than
raised: an auditor wants the list. Nothing here looks at signatures; the caller does.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta

from unlearnd.errors import FormatError
from unlearnd.verify.ed25519 import check_public_key, key_id_of
from unlearnd.verify.notes import ED25519, NoteKey
from unlearnd.verify.statements import (
    Fields,
    Statement,
    digest_of,
    is_count,
    is_digest,
    is_digest_or_empty,
    is_text,
    read_statement,
)
from unlearnd.verify.texts import read_base64, show_moment
from unlearnd.verify.trees import Growing, leaf_hash
from unlearnd.verify.trust import Span, Trust

ASKED = ("user", "point", "dataset", "model")
ROLLS = timedelta(days=15)
"""By how much a deadline that is counted again may move besides: weekends and runs of holidays."""
CLOCKS_DIFFER = timedelta(minutes=10)
"""By how much the clocks of two processes of one store may differ."""
MAX_PROBLEMS = 100


@dataclass(frozen=True)
class Request:
    """A request leaf."""

    index: int
    request_id: str
    erasure_id: str
    asked: str
    received_at: datetime
    due_at: datetime
    """When it was due in the end: extensions in time, and pauses, are in it."""
    paused_at: datetime | None = None
    """Since when its clock stands still; None while it goes."""
    paused_until: datetime | None = None
    """When somebody was to look at a hold again; None where none is, or no day is set."""


@dataclass(frozen=True)
class Asked:
    """What a caller wants to know of single leaves, so that the walk need not keep them all."""

    sizes: frozenset[int] = frozenset()
    """Tree sizes whose roots are wanted."""
    leaf: int | None = None
    """The index of the leaf that is wanted, and before which `latest` is taken."""
    slice_roots: frozenset[tuple[str, int, int, str]] = frozenset()
    recipes: frozenset[tuple[str, str]] = frozenset()
    """Checkpoints, as (model, recipe)."""


@dataclass
class Log:
    """What the walk found."""

    size: int = 0
    root: bytes = b""
    roots: dict[int, bytes] = field(default_factory=dict)
    leaf: bytes | None = None
    latest: datetime | None = None
    """The latest moment that a leaf before the one asked for names as its own."""
    requests: dict[int, Request] = field(default_factory=dict)
    """By index."""
    ends: dict[tuple[str, str], int] = field(default_factory=dict)
    """Where keys end, by role and id: replaced or revoked."""
    problems: list[str] = field(default_factory=list)
    slice_roots: dict[tuple[str, int, int, str], int] = field(default_factory=dict)
    """Where each slice root asked for was first logged."""
    built: dict[tuple[str, str], list[int]] = field(default_factory=dict)
    """Where each checkpoint asked for was built: more than once when one was damaged."""
    destroyed: dict[tuple[str, str], list[tuple[int, str, int, int, str]]] = field(default_factory=dict)
    """Leaf, erasure (empty for none), shard, slice and file of every destruction of a checkpoint asked for."""


def replay_log(leaves: Iterable[bytes], trust: Trust, asked: Asked, now: datetime) -> Log:
    """Walk through all leaves of a log and return what they add up to."""
    walk = _Walk(trust, asked, now)
    for leaf in leaves:
        walk.step(leaf)
    walk.finish()
    return walk.log


class _Walk:
    def __init__(self, trust: Trust, asked: Asked, now: datetime) -> None:
        self.log = Log()
        self._trust, self._asked, self._now = trust, asked, now
        self._tree = Growing()
        self._latest = datetime.min.replace(tzinfo=UTC)
        self._open: dict[str, Request] = {}
        self._answers: dict[int, tuple[str, str]] = {}
        self._request_ids: dict[str, int] = {}
        self._answered: dict[str, int] = {}
        self._closed: set[str] = set()
        self._policies: set[str] = set()
        self._added: dict[tuple[str, str], int] = {}
        self._in_use: dict[str, str] = {}
        self._revoked: dict[tuple[str, str], int] = {}
        self._first_keys = True
        self._kinds: Mapping[str, Callable[[int, Fields], datetime | None]] = {
            "genesis": self._genesis,
            "key": self._key,
            "dataset": self._at,
            "slices": self._slices,
            "model": self._at,
            "built": self._built,
            "destroyed": self._destroyed,
            "liveset": self._at,
            "request": self._request,
            "extended": self._extended,
            "begun": self._begun,
            "paused": self._paused,
            "resumed": self._resumed,
            "refused": self._refused,
            "policy": self._policy,
            "restricted": self._restricted,
            "returned": self._restricted,
            "erasure": self._erasure,
            "rebuilt": self._rebuilt,
            "restored": self._restored,
        }

    def step(self, leaf: bytes) -> None:
        if self._tree.size in self._asked.sizes:
            self.log.roots[self._tree.size] = self._tree.root()
        index = self._tree.size
        self._tree.add(leaf_hash(leaf))
        if index == self._asked.leaf:
            self.log.leaf, self.log.latest = leaf, self._latest
        try:
            statement = read_statement(leaf)
            if index == 0 and statement.kind != "genesis":
                self._wrong(0, "the first leaf is not genesis")
            self._first_keys &= statement.kind in ("genesis", "key")
            if reads := self._kinds.get(statement.kind):
                self._check_subject(statement)
                moment = reads(index, Fields(statement.predicate, statement.kind))
                if moment:
                    self._latest = max(self._latest, moment)
        except FormatError as error:
            self._wrong(index, str(error))

    def finish(self) -> None:
        log = self.log
        log.size, log.root = self._tree.size, self._tree.root()
        if log.size in self._asked.sizes:
            log.roots[log.size] = log.root
        if not log.size:
            self._wrong(0, "the log is empty, and a log begins with genesis")
        for request in self._open.values():
            if request.paused_at is not None:
                if request.paused_until is not None and self._now > request.paused_until:
                    until = show_moment(request.paused_until)
                    self._wrong(request.index, f"request {request.request_id} was held until {until} and no longer")
            elif self._now > request.due_at:
                due = show_moment(request.due_at)
                self._wrong(request.index, f"request {request.request_id} was due {due} and has no receipt")
        keys: list[tuple[str, str, Span]] = [("log", k.key.id.hex(), k.span) for k in self._trust.log_keys]
        keys += [("receipt", k.key_id, k.span) for k in self._trust.receipt_keys]
        for role, key_id, span in keys:
            if span.since >= log.size:
                continue  # newer than this export
            added = self._added.get((role, key_id))
            if added is None:
                self._wrong(None, f"the {role} key {key_id[:12]} of the trust file was never added in the log")
            elif added > span.since:
                self._wrong(
                    added, f"the {role} key {key_id[:12]} is trusted from leaf {span.since} on, before it was added"
                )

    def _wrong(self, index: int | None, what: str) -> None:
        if len(self.log.problems) < MAX_PROBLEMS:
            self.log.problems.append(what if index is None else f"leaf {index}: {what}")

    def _check_subject(self, statement: Statement) -> None:
        if statement.kind == "erasure":
            return  # its subject is the detail document, and is checked with the rest of it
        if statement.subject != ((statement.kind, digest_of(statement.predicate)),):
            raise FormatError(f"the subject is not the {statement.kind} it comes with")

    def _at(self, index: int, fields: Fields) -> datetime:
        return _to_the_minute(fields, "at")

    def _genesis(self, index: int, fields: Fields) -> datetime:
        if index:
            self._wrong(index, "a second genesis")
        if fields.text("storeId") != self._trust.store_id or fields.text("origin") != self._trust.origin:
            self._wrong(index, "genesis is of another store or log than the trust file")
        return _to_the_minute(fields, "createdAt")

    def _key(self, index: int, fields: Fields) -> datetime:
        role = fields.choice("role", "log", "receipt")
        public = read_base64(fields.text("publicKey"), "publicKey")
        check_public_key(public)
        key_id = fields.text("keyId")
        expected = key_id_of(public) if role == "receipt" else NoteKey(self._trust.origin, ED25519, public).id.hex()
        if key_id != expected:
            raise FormatError(f"the {role} key {expected[:12]} is logged under another id")
        key = (role, key_id)
        if fields.choice("action", "add", "revoke") == "add":
            if key in self._added:
                self._wrong(index, f"the {role} key {key_id[:12]} is added a second time")
            # The first keys cannot be in the log before it is there: they count from its beginning.
            self._added.setdefault(key, 0 if self._first_keys else index)
            if role in self._in_use:
                self._end((role, self._in_use[role]), index)
            self._in_use[role] = key_id
        else:
            since = fields.count("since")
            if key not in self._added or since > index:
                self._wrong(index, f"the {role} key {key_id[:12]} is revoked before it was added, or for later leaves")
            elif self._revoked.get(key, since) < since:
                self._wrong(index, f"a revocation of the {role} key {key_id[:12]} is taken back")
            self._revoked[key] = min(since, self._revoked.get(key, since))
            self._end(key, since)
        return _to_the_minute(fields, "at")

    def _end(self, key: tuple[str, str], index: int) -> None:
        self.log.ends[key] = min(index, self.log.ends.get(key, index))

    def _slices(self, index: int, fields: Fields) -> datetime:
        dataset = fields.text("dataset")
        for shard, slice_, root, _ in fields.rows("roots", is_count, is_count, is_digest, is_count):
            entry = (dataset, shard, slice_, root)
            if entry in self._asked.slice_roots:
                self.log.slice_roots.setdefault(entry, index)
        return _to_the_minute(fields, "at")

    def _built(self, index: int, fields: Fields) -> datetime:
        model = fields.text("model")
        kinds = (is_count, is_count, is_digest, is_digest_or_empty, is_digest_or_empty, is_digest, is_digest, is_count)
        for entry in fields.rows("checkpoints", *kinds):
            if (model, entry[2]) in self._asked.recipes:
                self.log.built.setdefault((model, entry[2]), []).append(index)
        return _to_the_minute(fields, "at")

    def _destroyed(self, index: int, fields: Fields) -> datetime:
        # Empty where a damaged checkpoint was put away, and nobody was erased.
        model, erasure_id = fields.text("model"), fields.text_or_empty("erasureId")
        for shard, slice_, recipe, file in fields.rows("checkpoints", is_count, is_count, is_digest, is_digest):
            if (model, recipe) in self._asked.recipes:
                entry = (index, erasure_id, shard, slice_, file)
                self.log.destroyed.setdefault((model, recipe), []).append(entry)
        return _to_the_minute(fields, "at")

    def _request(self, index: int, fields: Fields) -> None:
        request = Request(
            index,
            fields.text("requestId"),
            # Empty where it waits; `begun` then says with which others it is carried out.
            fields.text_or_empty("erasureId"),
            fields.choice("kind", *ASKED),
            _to_the_minute(fields, "receivedAt"),
            _to_the_minute(fields, "dueAt"),
        )
        if "policy" in fields.value and fields.digest("policy") not in self._policies:
            self._wrong(index, "a request came in under a policy that no earlier leaf has")
        if request.due_at < request.received_at:
            self._wrong(index, "a request is due before it was received")
        if request.request_id in self._request_ids:
            self._wrong(index, f"request {request.request_id} is received a second time")
            return
        self._request_ids[request.request_id] = index
        self._open[request.request_id] = self.log.requests[index] = request

    def _extended(self, index: int, fields: Fields) -> datetime:
        at, due = _to_the_minute(fields, "at"), _to_the_minute(fields, "dueAt")
        request = self._open.get(fields.text("requestId"))
        if request is None:
            self._wrong(index, "a request is extended that is not open")
        elif at > request.due_at or due < request.due_at:
            self._wrong(index, f"request {request.request_id} is extended too late, or to an earlier day")
        else:
            extended = replace(request, due_at=due)
            self._open[request.request_id] = self.log.requests[request.index] = extended
        return at

    def _begun(self, index: int, fields: Fields) -> datetime:
        erasure_id = fields.text("erasureId")
        for request_id in fields.texts("requests"):
            request = self._open.get(request_id)
            if request is None or request.erasure_id:
                self._wrong(index, "a request is begun that is not waiting")
            else:
                if request.paused_at is not None:
                    self._wrong(index, f"request {request_id} is begun while its clock stands still")
                begun = replace(request, erasure_id=erasure_id)
                self._open[request_id] = self.log.requests[request.index] = begun
        return _to_the_minute(fields, "at")

    def _paused(self, index: int, fields: Fields) -> datetime:
        at, until = _to_the_minute(fields, "at"), fields.text_or_empty("until")
        fields.text("reason")
        request = self._open.get(fields.text("requestId"))
        if request is None:
            self._wrong(index, "the clock of a request is stopped that is not open")
        elif request.paused_at is None and at > request.due_at:
            self._wrong(index, f"the clock of request {request.request_id} is stopped after it was due")
        elif request.paused_until is not None and at > request.paused_until:
            self._wrong(index, f"the hold of request {request.request_id} was looked at again too late")
        else:
            paused = replace(
                request,
                paused_at=request.paused_at or at,
                paused_until=_to_the_minute(fields, "until") if until else None,
            )
            self._open[request.request_id] = self.log.requests[request.index] = paused
        return at

    def _resumed(self, index: int, fields: Fields) -> datetime:
        at, due = _to_the_minute(fields, "at"), _to_the_minute(fields, "dueAt")
        request = self._open.get(fields.text("requestId"))
        if request is None or request.paused_at is None:
            self._wrong(index, "the clock of a request goes on that did not stand still")
        elif not request.due_at <= due <= request.due_at + max(at - request.paused_at, timedelta(0)) + ROLLS:
            self._wrong(index, f"request {request.request_id} is due at another time than its pause accounts for")
        else:
            resumed = replace(request, due_at=due, paused_at=None, paused_until=None)
            self._open[request.request_id] = self.log.requests[request.index] = resumed
        return at

    def _policy(self, index: int, fields: Fields) -> datetime:
        fields.text("policy")
        self._policies.add(fields.digest("digest"))
        return _to_the_minute(fields, "at")

    def _restricted(self, index: int, fields: Fields) -> datetime:
        if fields.text("requestId") not in self._request_ids:
            self._wrong(index, "points are restricted, or returned, for a request that never came in")
        kinds = (is_text, is_count, is_count, is_count, is_digest_or_empty, is_digest_or_empty)
        fields.rows("slices", *kinds)
        return _to_the_minute(fields, "at")

    def _refused(self, index: int, fields: Fields) -> datetime:
        at = _to_the_minute(fields, "at")
        fields.text("reason")
        request = self._open.pop(fields.text("requestId"), None)
        if request is None:
            self._wrong(index, "a request is refused that is not open")
        else:
            self._closed.add(request.request_id)
            if request.paused_at is None and at > request.due_at:
                due = show_moment(request.due_at)
                self._wrong(index, f"request {request.request_id} was due {due} and refused later")
        return at

    def _erasure(self, index: int, fields: Fields) -> datetime:
        request_id, erasure_id = fields.text("requestId"), fields.text("erasureId")
        removed = fields.moment("influenceRemovedAt")
        self._answers[index] = (request_id, erasure_id)
        if request_id in self._answered:
            self._wrong(index, f"request {request_id} has a receipt at leaf {self._answered[request_id]} already")
            return removed
        if request_id in self._closed:
            self._wrong(index, f"request {request_id} was refused, and has a receipt")
        self._answered[request_id] = index
        request = self._open.pop(request_id, None)
        if request is not None and request.paused_at is not None:
            self._wrong(index, f"request {request_id} has a receipt while its clock stands still")
        if fields.value.get("policy") is not None and fields.within("policy").digest("digest") not in self._policies:
            self._wrong(index, "a receipt names a policy that no earlier leaf has")
        if fields.text("storeId") != self._trust.store_id:
            self._wrong(index, "a receipt of another store")
        given = fields.within("request")
        problem = disagreement(
            self.log.requests.get(given.count("leafIndex")),
            index,
            (request_id, erasure_id, fields.text("asked")),
            (given.moment("receivedAt"), given.moment("dueAt")),
        )
        if problem:
            self._wrong(index, problem)
        if removed > given.moment("dueAt"):
            self._wrong(index, f"request {request_id} was due {show_moment(given.moment('dueAt'))} and answered later")
        if removed + CLOCKS_DIFFER < self._latest:
            later = show_moment(self._latest)
            self._wrong(index, f"a receipt is dated {show_moment(removed)}, and a leaf before it {later}")
        return removed

    def _rebuilt(self, index: int, fields: Fields) -> datetime:
        erasure_id = fields.text("erasureId")
        for receipt in fields.list("receipts"):
            if not is_count(receipt) or self._answers.get(receipt, ("", ""))[1] != erasure_id:
                self._wrong(index, "rebuilt refers to something that is not a receipt of its erasure")
                break
        fields.rows("models", is_text, is_count, is_count)
        return _to_the_minute(fields, "at")

    def _restored(self, index: int, fields: Fields) -> datetime:
        if fields.count("size") > index:
            self._wrong(index, "a store went back to a log that is longer than the one it went back in")
        fields.list("lost")
        return _to_the_minute(fields, "at")


def disagreement(
    request: Request | None, index: int, said: tuple[str, str, str], dates: tuple[datetime, datetime]
) -> str | None:
    """Return how a receipt at leaf `index` and its request leaf disagree; None when they agree.

    `said` is request, erasure and what was asked for; `dates` when it was received and due. Leaves hold minutes only.
    """
    if request is None or request.index >= index:
        return "the receipt refers to a leaf that is not an earlier request"
    if said != (request.request_id, request.erasure_id, request.asked):
        return f"the receipt is for another request than leaf {request.index}"
    if tuple(moment.replace(second=0) for moment in dates) != (request.received_at, request.due_at):
        return f"the receipt has other dates than its request, leaf {request.index}"
    return None


def _to_the_minute(fields: Fields, name: str) -> datetime:
    moment = fields.moment(name)
    if moment.second:
        raise FormatError(f"{name} is finer than the minute")
    return moment
