"""Check a whole store: its log, its storage, its data, and by retraining.

Whoever runs the store may be the one who is audited, so nothing here believes the ledger: it is held against the log,
the log against its signed tree heads, storage and data against both. Each check stands alone and passes, fails, or
says why it could not run. Nothing is written, no lease is taken, and the ledger is read in short transactions, so that
erasures go on meanwhile; a check that fails while the store changes under it is run again.
"""

import hmac
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from unlearnd.accounts import Claims, account_for, false_claims, is_changing, read_claims
from unlearnd.agreement import chain_of, disagreements, name_of
from unlearnd.build import check_backend
from unlearnd.digests import digest_of
from unlearnd.errors import (
    DamagedStoreError,
    InputError,
    NotFoundError,
    RefusedError,
    UnlearndError,
    VerificationError,
)
from unlearnd.features import Sight
from unlearnd.history import History, LiveSet, read_history
from unlearnd.inventory import (
    SliceData,
    excuses,
    known_names,
    problem_of,
    read_slice_data,
    wrong_bases,
    wrong_features,
)
from unlearnd.ledger import log, points
from unlearnd.ledger.models import Checkpoint, Model
from unlearnd.ledger.moments import Moment, look_at, pulse_of
from unlearnd.replay import ShardRows, check_committed, differences, draw, read_shard, train_again
from unlearnd.storage import CLAIM, Version
from unlearnd.translog import detail_path, receipt_path, trust
from unlearnd.verify.checks import verify_receipt
from unlearnd.verify.logs import Asked, Log, replay_log
from unlearnd.verify.receipts import Detail, Opening, lists_of, read_detail, read_opening
from unlearnd.verify.reports import Check, Report, Result
from unlearnd.verify.statements import Fields, canonical, is_count, is_digest, is_text, read_canonical
from unlearnd.verify.texts import show_moment
from unlearnd.verify.trees import root_of_leaves
from unlearnd.verify.trust import Trust, check_head, read_head, read_trust

if TYPE_CHECKING:
    from unlearnd.store import Store

TITLES: Mapping[str, str] = {
    "L1": "consistency",
    "L2": "log replay",
    "S1": "checkpoint digests",
    "S2": "nothing else",
    "D1": "erased points",
    "D2": "lineage",
    "D3": "live rows",
    "P1": "replay",
}
LEVELS: Mapping[int, str] = {
    3: "the store: its log holds together, and it keeps what the log says and nothing else",
    4: "the data: moreover, the rows in use are those the log committed to, less exactly what was erased",
    5: "replayed: moreover, training again gave the same states",
}
MAX_DETAIL = 2**30
_ATTEMPTS = 3
_LEAVES_AT_ONCE = 1_000


class AuditReport(Report):
    """What an audit found."""

    @property
    def level(self) -> int | None:
        """The level of assurance: 3 the store, 4 its data, 5 replayed; None when a check failed or could not run."""
        passed = {check.id for check in self.checks if check.result is Result.PASS}
        if self.failed or not passed.issuperset(("L2", "S1", "S2", "D2")):
            return None
        return 3 if "D1" not in passed else 4 if "P1" not in passed else 5

    @property
    def exit_code(self) -> int:
        """0, or 3 when a check failed."""
        return 3 if self.failed else 0

    def as_json(self) -> dict[str, Any]:
        """Return the report for a script."""
        means = None if self.level is None else LEVELS[self.level]
        checks = [
            {"id": check.id, "title": check.title, "result": check.result.value, "sentence": check.sentence}
            for check in self.checks
        ]
        return {
            "failed": list(self.failed),
            "level": self.level,
            "levelMeans": means,
            "about": dict(self.about),
            "checks": checks,
            "limits": list(self.limits),
        }

    def lines(self) -> Iterator[str]:
        """Yield the report for people."""
        for check in self.checks:
            yield f"{check.id}  {check.result.value:<11}  {check.title}: {check.sentence}"
        yield ""
        if self.failed:
            yield f"DO NOT RELY ON THIS STORE: {', '.join(self.failed)} did not hold. Assurance level: none."
        elif self.level is None:
            left = [c.id for c in self.checks if c.result is Result.NOT_CHECKED and c.id in ("L2", "S1", "S2", "D2")]
            yield f"Assurance level: none, because {', '.join(left)} could not be checked."
        else:
            yield f"Assurance level {self.level}: {LEVELS[self.level]}."
        yield ""
        yield "No audit can prove:"
        for limit in self.limits:
            yield f"- {limit}"


def audit(
    store: "Store",
    *,
    replay: int | Literal["all"] | None = None,
    head: bytes | None = None,
    opening: bytes | None = None,
    trust: bytes | None = None,
) -> AuditReport:
    """Check everything a store holds; change nothing.

    `replay` is how many checkpoints to train again, drawn by the log's root, or `all`; `head` a tree head kept from
    earlier; `opening` what a user was given; `trust` a trust file kept from earlier, else the store's own keys.
    """
    if isinstance(replay, int) and replay < 1:
        raise InputError("to replay is at least one checkpoint, or all")
    look = _Audit(store, replay, head, opening, trust)
    checks = {
        "L1": look.consistency,
        "L2": look.log_replay,
        "S1": look.checkpoint_digests,
        "S2": look.nothing_else,
        "D1": look.erased_points,
        "D2": look.lineage,
        "D3": look.live_rows,
        "P1": look.replay,
    }
    results = tuple(look.run(check_id, check) for check_id, check in checks.items())
    return AuditReport(results, look.about())


class _NotCheckedError(Exception):
    """A check lacks what it would need; the text says what."""


@dataclass
class _Findings:
    """What one check came upon."""

    wrong: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)

    def conclude(self, check_id: str, sentence: str) -> Check:
        """Return the check's result: one thing wrong fails it, one thing unknown leaves it open."""
        for result, listed in ((Result.FAIL, self.wrong), (Result.NOT_CHECKED, self.unknown)):
            if listed:
                more = f" (and {len(listed) - 1} more)" if len(listed) > 1 else ""
                return Check(check_id, TITLES[check_id], result, _printable(listed[0]) + more)
        return Check(check_id, TITLES[check_id], Result.PASS, sentence)


class _Audit:
    """A store under audit, and what was read of it so far."""

    def __init__(
        self,
        store: "Store",
        replay: int | Literal["all"] | None,
        head: bytes | None,
        opening: bytes | None,
        trusted: bytes | None,
    ) -> None:
        self._store, self._ledger, self._storage = store, store.ledger, store.storage
        self._shelf = store.translog.shelf
        self._replay, self._head, self._opening_file, self._given_trust = replay, head, opening, trusted
        self._now = store.clock()

    def run(self, check_id: str, check: Callable[[_Findings], str]) -> Check:
        """Carry out one check; when it fails and the store has changed meanwhile, look again."""
        for _ in range(_ATTEMPTS):
            concluded = self._run_once(check_id, check)
            if concluded.result is not Result.FAIL or not self._has_changed():
                return concluded
            self._forget()
        sentence = f"the store kept changing while it was read, try again when it is quieter: {concluded.sentence}"
        return Check(check_id, TITLES[check_id], Result.NOT_CHECKED, sentence)

    def about(self) -> dict[str, Any]:
        """Return what the audit was about."""
        return {
            "storeId": self._store.config.store_id,
            "origin": self._store.translog.origin,
            "at": show_moment(self._now),
        }

    def _run_once(self, check_id: str, check: Callable[[_Findings], str]) -> Check:
        found = _Findings()
        sentence = ""
        try:
            sentence = check(found)
        except _NotCheckedError as lacking:
            found.unknown.append(str(lacking))
        except (VerificationError, DamagedStoreError, NotFoundError) as error:
            found.wrong.append(str(error))
        except UnlearndError as error:
            found.unknown.append(f"it could not be carried out: {error}")
        except Exception as error:
            # Ledger and files are the audited party's: whatever they are made to hold must end in a verdict. Not
            # the message, which may hold somebody's data.
            found.wrong.append(f"what is stored cannot be made sense of ({type(error).__name__})")
        return found.conclude(check_id, sentence)

    def _has_changed(self) -> bool:
        try:
            return pulse_of(self._ledger) != self.moment.pulse
        except Exception:  # as above
            return False

    def _forget(self) -> None:
        for name in ("moment", "trust_file", "trust", "log", "history", "details", "claims", "data"):
            self.__dict__.pop(name, None)

    # What the checks look at, read once.

    @cached_property
    def moment(self) -> Moment:
        return look_at(self._ledger)

    @cached_property
    def trust_file(self) -> bytes:
        return self._given_trust if self._given_trust is not None else trust(self._store.translog)

    @cached_property
    def trust(self) -> Trust:
        """The keys to believe, ended where the log says so."""
        return read_trust(self.trust_file).ended(self.log.ends)

    @cached_property
    def log(self) -> Log:
        sizes = set(self.moment.heads)
        if self._head is not None:
            # A tree head that cannot be read is L1's to report, and no reason for the others to stop.
            with suppress(VerificationError):
                sizes.add(read_head(self._head)[1].size)
        return replay_log(self._leaves(), read_trust(self.trust_file), Asked(frozenset(sizes)), self._now)

    @cached_property
    def history(self) -> History:
        return read_history(self._leaves())

    @cached_property
    def details(self) -> Mapping[str, Detail | str]:
        """The detail document of each receipt, by request; or what is wrong with it."""
        return {request: self._detail_of(request) for request in self.history.receipts}

    @cached_property
    def claims(self) -> Claims:
        """Who says to have changed which slice."""
        readable = {request: detail for request, detail in self.details.items() if not isinstance(detail, str)}
        outcomes = {request.id: request.outcome or {} for request in self.moment.requests}
        return read_claims(self.history, readable, outcomes)

    @cached_property
    def data(self) -> SliceData:
        """All slice data, read once."""
        opening = self._opening()
        wanted = self._store.keys.handles([opening.user])[0] if opening else None
        return read_slice_data(self._ledger, self._storage, self.moment, self.history, wanted)

    # The checks.

    def consistency(self, found: _Findings) -> str:
        """L1: the log extends the tree head that the auditor kept."""
        if self._head is None:
            raise _NotCheckedError("no earlier tree head was given, so a rewritten history would not be seen")
        note, older = read_head(self._head)
        check_head(note, older, self.trust)
        if older.size > self.log.size:
            found.wrong.append(f"the log has {self.log.size} leaves, the tree head kept already {older.size}")
        elif self.log.roots[older.size] != older.root:
            found.wrong.append(f"the first {older.size} leaves of the log are not those of the tree head kept")
        return f"the log of {self.log.size} leaves begins with the {older.size} of the tree head kept"

    def log_replay(self, found: _Findings) -> str:
        """L2: all leaves hash to the signed root, nothing is missing, overdue or out of order; the ledger agrees."""
        self._check_heads(found)
        found.wrong += self.log.problems
        found.wrong += [problem for problem in self.history.problems if problem not in self.log.problems]
        self._check_keys(found)
        found.wrong += disagreements(self.moment, self.history)
        for entry in self.moment.receipts:
            if entry.key_id is not None:
                self._check_receipt_file(found, entry.request_id)
        newest = max(self.moment.heads, default=0)
        unsigned = self.log.size - newest
        tail = f" ({unsigned} after it are not signed yet)" if unsigned else ""
        waiting = f"; {len(self.history.waiting)} open and not overdue" if self.history.waiting else ""
        return (
            f"all leaves hash to the tree head of size {newest}{tail}, {len(self.history.requests)} requests have "
            f"{len(self.history.receipts)} receipts{waiting}, and the ledger says the same"
        )

    def checkpoint_digests(self, found: _Findings) -> str:
        """S1: every live checkpoint has the bytes, and the tensors, that the log says."""
        count = 0
        for name, checkpoint in self.moment.live():
            count += 1
            problem = problem_of(self._storage, checkpoint, self.history.live.get((name, checkpoint.recipe)))
            if problem:
                found.wrong.append(f"{checkpoint.path} {problem}")
        for name in self.history.live_sets:
            self._check_live_set(found, name)
        return f"{count} checkpoints have the file and tensors digests that were logged when they were built"

    def nothing_else(self, found: _Findings) -> str:
        """S2: storage holds checkpoints, slice data with its features, and bases in force, and nothing else."""
        known = known_names(self.moment)
        evidence = ("evidence/detail/", "evidence/receipts/", "evidence/log/")
        listed = [name for name in self._storage.list("") if not name.startswith(evidence) and name != CLAIM]
        strange = sorted(set(listed) - known)
        for name, why in excuses(self.moment, self.history, strange, self._now.timestamp()).items():
            if why:
                found.unknown.append(f"{name} is there and not known: {why}")
            else:
                found.wrong.append(f"{name} is there and should not be")
        found.wrong += [f"{name} is not there" for name in sorted(known - set(listed))]
        found.wrong += self.data.wrong
        found.wrong += wrong_features(self._storage, self.moment)
        found.wrong += wrong_bases(self._storage, self.moment)
        found.wrong += self._older_versions(known, evidence)
        return f"{len(listed)} objects, each of them known, and the slice data as recorded"

    def _older_versions(self, known: set[str], evidence: tuple[str, ...]) -> list[str]:
        """Return what a bucket keeps besides the objects it shows: older versions, markers, unfinished uploads."""
        wrong = []
        for version in self._storage.versions(""):
            plain = version.kind == "version" and version.latest
            if plain or version.name.startswith(evidence) or version.name == CLAIM:
                continue
            if version.kind == "version" and version.name in known and self._is_same(version):
                # Written twice, as when the answer to the first request was lost.
                continue
            what = {"version": "an older version", "marker": "a marker", "upload": "an unfinished upload"}[version.kind]
            wrong.append(f"{version.name} has {what} in the bucket, which should not be")
        return wrong

    def _is_same(self, version: Version) -> bool:
        """Say whether an older version has the bytes of the newest."""
        try:
            older = self._storage.read(version.name, version.id)
        except NotFoundError:
            return True
        return digest_of(older) == digest_of(self._storage.read(version.name))

    def erased_points(self, found: _Findings) -> str:
        """D1: what each slice held before, less what it holds now, is exactly what receipts say was erased."""
        history = self.history
        for request, detail in self.details.items():
            if isinstance(detail, str):
                found.wrong.append(f"the detail of request {request} {detail}")
                continue
            for model, _, _, recipe, _, _ in detail.destroyed:
                if (model, recipe) not in history.destroyed:
                    found.wrong.append(f"request {request} says to have destroyed a checkpoint that no leaf does")
        found.wrong += false_claims(history, self.claims)
        for place in sorted(history.slices):
            now = self.data.committed[place]
            if isinstance(now, str):
                found.wrong.append(f"the rows of {name_of(place)} cannot be compared: {now}")
            elif finding := account_for(history, self.claims, place, now, self.moment.restrictions):
                (found.wrong if finding[0] is Result.FAIL else found.unknown).append(finding[1])
        erased = sum(len(d.erased) for d in self.details.values() if not isinstance(d, str))
        since = f"; {len(history.given_up)} since a restore that had lost rows of theirs" if history.given_up else ""
        return (
            f"{erased} erased points, put back in memory, give every root that {len(history.slices)} slices ever had"
            f"{since}"
        )

    def lineage(self, found: _Findings) -> str:
        """D2: no live checkpoint, and none before it in its chain, saw a slice root that is no longer current."""
        count = 0
        found.wrong += self._come_back()
        for name, model in self.moment.models.items():
            dataset = self.moment.datasets[model.dataset_id].name
            chains = {
                shard: (roots := self.history.roots_of(dataset, shard), chain_of(model, shard, roots))
                for shard in range(1, model.spec.shards + 1)
            }
            rows: set[tuple[int, int, str]] = {(c.shard, c.slice, c.recipe) for c in self.moment.checkpoints[name]}
            rows |= {(b.shard, b.slice, b.recipe) for (m, _), b in self.history.live.items() if m == name}
            rows |= {(s, r, recipe) for s, r, recipe in self._listed_live(name)}
            for shard, slice_, recipe in sorted(rows):
                count += 1
                where = f"the checkpoint of '{name}' for shard {shard}, slice {slice_}"
                roots, chain = chains.get(shard, ([], []))
                built = self.history.live.get((name, recipe))
                if slice_ < len(chain) and recipe == chain[slice_]:
                    if built is not None and (built.parent, built.slice_root) != (chain[slice_ - 1], roots[slice_ - 1]):
                        found.wrong.append(f"{where} was logged with another state or slice root before it than it has")
                elif is_changing(self.history, self.claims, dataset, shard) or any(
                    (dataset, shard) in restriction.unsettled for restriction in self.moment.restrictions
                ):
                    found.unknown.append(
                        f"{where} is to be destroyed by an erasure that has not ended, try again later"
                    )
                else:
                    found.wrong.append(f"{where} was made from slice roots that are no longer current")
        return f"{count} checkpoints, each made from current slice roots alone, down to the initial state"

    def _come_back(self) -> Iterator[str]:
        """Yield the models that an order had destroyed, by its receipt, and that are there all the same."""
        for request, detail in self.details.items():
            if not isinstance(detail, str) and self.history.receipts[request][1].asked in ("dataset", "model"):
                for name in sorted({entry[0] for entry in detail.models}):
                    model = self.moment.models.get(name)
                    again = any(built == name for built, _ in self.history.live)
                    if again or self.moment.checkpoints.get(name) or (model is not None and model.retired_at is None):
                        yield f"model '{name}' was destroyed by an order, request {request}, and is in service again"

    def live_rows(self, found: _Findings) -> str:
        """D3: the receipt is about the user of the opening, and that user owns no live row."""
        if self._opening_file is None:
            raise _NotCheckedError("the opening that a user was given is needed to look for their rows")
        opening = read_opening(self._opening_file)
        if opening.request_id not in self.history.receipts:
            raise NotFoundError("the log has no receipt for the request of the opening")
        said = self.history.receipts[opening.request_id][1]
        committed = hmac.digest(opening.nonce, b"unlearnd/user/v1\n" + opening.user.encode(), "sha256").hex()
        if said.user_commitment is None or not hmac.compare_digest(committed, said.user_commitment):
            found.wrong.append("the opening does not open the receipt's commitment: it is about another user")
        handle = self._store.keys.handles([opening.user])[0]
        known = [r.handle for r in self.moment.requests if r.id == opening.request_id]
        if known == [None]:
            # Its record has expired, or the ledger was restored from before it and it was about nobody here.
            found.unknown.append("the ledger no longer says whose request it was")
        elif known != [handle]:
            found.wrong.append("the ledger has the request under another handle than this user's")
        held = points.holdings_of(self._ledger, [handle])
        if held:
            found.wrong.append(f"the user has points in {len(held)} slices: never taken out, or put in again since")
        if self.data.owned:
            found.wrong.append(f"the user owns {self.data.owned} rows in slice data")
        if self.data.unread:
            found.unknown.append(f"{self.data.unread} pieces of slice data cannot be looked into")
        if points.user_keys(self._ledger, [handle]):
            found.wrong.append("the user's key is in the ledger, and an erasure destroys it")
        return f"the opening opens the receipt; none of {self.data.rows} rows in use is that user's"

    def replay(self, found: _Findings) -> str:
        """P1: training the steps drawn again gives the states that were logged."""
        if self._replay is None:
            raise _NotCheckedError("only retraining shows that weights come from the rows named: --replay N or all")
        live = {(name, c.recipe): c for name, c in self.moment.live()}
        if not live:
            raise _NotCheckedError("there is no checkpoint to train again")
        if not self.moment.heads:
            raise NotFoundError("no tree head was ever signed, so nothing can be drawn")
        root = read_head(self.moment.heads[max(self.moment.heads)].encode())[1].root
        count = len(live) if self._replay == "all" else self._replay
        drawn = set(draw(root, (recipe for _, recipe in live), count))
        steps = sorted(
            ((name, c) for (name, recipe), c in live.items() if recipe in drawn),
            key=lambda step: (step[0], step[1].shard, step[1].slice),
        )
        cache: dict[tuple[str, int], ShardRows] = {}
        for name, checkpoint in steps:
            key = (name, checkpoint.shard)
            if key not in cache:
                cache.clear()
            self._replay_step(found, self.moment.models[name], checkpoint, cache)
        return f"{len(steps)} of {len(live)} checkpoints trained again, each with the same tensors as logged"

    # L2 in parts.

    def _check_heads(self, found: _Findings) -> None:
        moment, replayed = self.moment, self.log
        if (replayed.size, replayed.root) != (moment.size, moment.root):
            found.wrong.append("the leaves do not hash to the root that the ledger's own hashes give")
        if not moment.heads:
            found.wrong.append("no tree head was ever signed")
        for size, text in sorted(moment.heads.items(), reverse=True):
            note, head = read_head(text.encode())
            if size == max(moment.heads):
                check_head(note, head, self.trust)
            if head.size != size or replayed.roots.get(size) != head.root:
                found.wrong.append(f"the first {size} leaves are not those of the tree head signed for them")

    def _check_keys(self, found: _Findings) -> None:
        in_ledger = {(key.role, key.key_id): (key.since, key.until) for key in self.moment.keys}
        believed = {("log", k.key.id.hex()): k.span for k in self.trust.log_keys}
        believed |= {("receipt", k.key_id): k.span for k in self.trust.receipt_keys}
        for key, span in believed.items():
            if self._given_trust is not None and key not in in_ledger:
                found.wrong.append(f"the {key[0]} key {key[1][:12]} of the trust file is not one of the store's")
            elif key in in_ledger and in_ledger[key][1] != span.until:
                found.wrong.append(f"the {key[0]} key {key[1][:12]} ends at another leaf in the ledger than in the log")
        for role, key_id in in_ledger.keys() - believed.keys():
            if self._given_trust is None:
                found.wrong.append(f"the {role} key {key_id[:12]} of the ledger is not in the trust file")

    def _check_receipt_file(self, found: _Findings, request: str) -> None:
        try:
            report = verify_receipt(self._shelf.read(receipt_path(request)), self.trust_file, now=self._now)
        except NotFoundError:
            found.wrong.append(f"the receipt of request {request} is not there")
            return
        broken = [check for check in report.failed if check in ("R1", "R2", "R3", "R4", "R6")]
        if broken or report.about.get("requestId") != request:
            found.wrong.append(
                f"the receipt of request {request} does not hold: {', '.join(broken) or 'another request'}"
            )

    # The others in parts.

    def _check_live_set(self, found: _Findings, model: str) -> None:
        paths = {c.recipe: c.path for c in self.moment.checkpoints.get(model, ())}
        entries: list[tuple[LiveSet, Sequence[Any]]] = []
        newest = self.history.live_sets[model]
        for said in dict.fromkeys(newest.values()):
            try:
                listed = self._live_set(model, said)
            except (VerificationError, NotFoundError) as error:
                found.wrong.append(f"the newest live set of '{model}' cannot be used: {error}")
                continue
            if (len(listed), root_of_leaves(map(canonical, listed)).hex()) != (said.count, said.root):
                found.wrong.append(f"the newest live set of '{model}' is not what its leaf says")
            entries += [(said, entry) for entry in listed if newest.get(entry[0], newest.get(None)) is said]
        for said, (shard, slice_, recipe, file, tensors, path, size) in entries:
            if self.history.destroyed.get((model, recipe), -1) > said.leaf:
                continue  # it went later; what the recipe gave then may be other bytes, where they are encrypted
            built = self.history.live.get((model, recipe))
            if built is None:
                found.wrong.append(f"the newest live set of '{model}' lists a checkpoint that is not live: {path}")
            elif (shard, slice_, file, tensors, size) != (
                built.shard,
                built.slice,
                built.file,
                built.tensors,
                built.size,
            ):
                found.wrong.append(f"{path} has other digests in the newest live set than when it was built")
            elif paths.get(recipe, path) != path:
                found.wrong.append(f"{path} is under another name in the ledger than in the newest live set")

    def _live_set(self, model: str, said: LiveSet) -> Sequence[Sequence[Any]]:
        data = self._document(said.detail)
        fields = Fields(read_canonical(data, "the document", MAX_DETAIL), "the document")
        kinds = (is_count, is_count, is_digest, is_digest, is_digest, is_text, is_count)
        if fields.text("model") != model:
            raise VerificationError("it is of another model")
        return fields.rows("checkpoints", *kinds)

    def _listed_live(self, model: str) -> Iterator[tuple[int, int, str]]:
        """Yield what the newest live set lists and no later leaf destroyed; nothing where S1 says it cannot be read."""
        newest = self.history.live_sets.get(model, {})
        for said in dict.fromkeys(newest.values()):
            with suppress(VerificationError, NotFoundError):
                for shard, slice_, recipe, *_ in self._live_set(model, said):
                    in_force = newest.get(shard, newest.get(None)) is said
                    if in_force and self.history.destroyed.get((model, recipe), -1) < said.leaf:
                        yield shard, slice_, recipe

    def _replay_step(
        self, found: _Findings, model: Model, checkpoint: Checkpoint, cache: dict[tuple[str, int], ShardRows]
    ) -> None:
        where = f"shard {checkpoint.shard}, slice {checkpoint.slice} of '{model.name}'"
        device = self._store.config.device
        if not model.deterministic:
            found.unknown.append(f"{where} cannot be replayed: its backend does not promise the same bits")
            return
        try:
            backend = check_backend(self._store.plugins, model)
        except (NotFoundError, RefusedError) as error:
            found.unknown.append(f"{where} cannot be replayed: {error}")
            return
        differ = differences(checkpoint.environment, backend.environment(device))
        if differ:
            found.unknown.append(f"{where} cannot be replayed here, the environment differs: {', '.join(differ)}")
            return
        dataset = self.moment.datasets[model.dataset_id]
        roots = self.history.roots_of(dataset.name, checkpoint.shard)
        chain = chain_of(model, checkpoint.shard, roots)
        parent, after = None, 0
        if model.sliceable:
            after = max((s for s in range(1, checkpoint.slice) if model.keeps(s)), default=0)
        if after:
            before: dict[str, Checkpoint] = {c.recipe: c for c in self.moment.checkpoints[model.name]}
            parent = before.get(chain[after]) if checkpoint.slice <= len(roots) else None
            if parent is None:
                found.wrong.append(f"the state before {where} is not there")
                return
        key = (model.name, checkpoint.shard)
        sight = Sight(self._storage, backend, model.spec, device)
        if key not in cache:
            last = self.moment.last_slices[dataset.id]
            cache[key] = read_shard(self._ledger, self._storage, dataset, model, checkpoint.shard, last, sight)
        check_committed(cache[key], roots, checkpoint.shard, checkpoint.slice)
        again = train_again(
            self._storage,
            backend,
            model,
            checkpoint.shard,
            checkpoint.slice,
            (after, parent),
            cache[key],
            sight,
            device,
        )
        built = self.history.live.get((model.name, checkpoint.recipe))
        if again != checkpoint.tensors or (built is not None and again != built.tensors):
            found.wrong.append(f"{where} trained again gives other tensors: it was not made from the rows named")

    # Small things.

    def _leaves(self) -> Iterable[bytes]:
        for begin in range(0, self.moment.size, _LEAVES_AT_ONCE):
            yield from log.leaves(self._ledger, begin, min(begin + _LEAVES_AT_ONCE, self.moment.size))

    def _opening(self) -> Opening | None:
        try:
            return read_opening(self._opening_file) if self._opening_file is not None else None
        except VerificationError:
            return None  # D3 says so

    def _document(self, digest: str) -> bytes:
        data = self._shelf.read(detail_path(digest))
        if digest_of(data) != digest:
            raise VerificationError(f"{detail_path(digest)} is not the document that was logged")
        return data

    def _detail_of(self, request: str) -> Detail | str:
        said = self.history.receipts[request][1]
        try:
            data = self._document(said.detail_digest)
            detail = read_detail(data, MAX_DETAIL)
        except (VerificationError, NotFoundError) as error:
            return f"cannot be used: {error}"
        lists = lists_of(detail)
        if len(data) != said.detail_size or detail.request_id != request:
            return "is of another size or request than the receipt says"
        if any(listed != getattr(said, name) for name, listed in lists.items()):
            return "does not give the roots of the receipt"
        if sum(entry[3] for entry in detail.slices) != len(detail.erased):
            return "lists another number of points than its slices lost"
        return detail


def _printable(sentence: str) -> str:
    """Return a sentence that cannot move a terminal's cursor: names in it come from files that nobody vouches for."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in sentence[:1000])
