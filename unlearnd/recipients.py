"""Who must be told of an erasure because they were given a model, and what came of it (GDPR, Article 19).

A copy that left the store no erasure here can reach; whoever has it can be told. Whom to tell is derived from what is
recorded: somebody was given a model before points that it may have seen were erased, or before it was destroyed by an
order, and had not given it back by then. Telling is for plugins; what came of it is kept, and tried again until
somebody was told or could not be.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from unlearnd.errors import InputError, NotFoundError, RefusedError
from unlearnd.leases import Clock, hold
from unlearnd.ledger import Ledger, dockets, erasures, models, points, recipients
from unlearnd.ledger.connection import stamp
from unlearnd.ledger.erasures import Request
from unlearnd.ledger.leases import telling_lease
from unlearnd.ledger.recipients import Notice, Recipient
from unlearnd.plugins import Plugins
from unlearnd.policy import DEFAULT, TellRecipients, load_policy
from unlearnd.requests import policy_of_digest

OUTCOMES = ("written", "sent", "acknowledged", "impossible", "disproportionate")
"""What a plugin or a person may say; `failed` and `unanswered` are said for them, and tried again."""
OWED = ("", "failed", "unanswered")
EXCUSES = ("impossible", "disproportionate")
"""The outcomes for which nobody is told; a policy says which of them it takes."""


@dataclass(frozen=True)
class Telling:
    """A recipient who must be told of an erasure, and what came of it."""

    recipient: Recipient
    erasure: str
    requests: tuple[str, ...]
    """Those of its requests that concern the model; each has a receipt."""
    outcome: str
    """Empty while nobody has tried."""
    reason: str
    at: str

    @property
    def owed(self) -> bool:
        """Whether it is still to be done."""
        return self.outcome in OWED


def tellings(ledger: Ledger, erasure_id: str | None = None) -> list[Telling]:
    """Return everybody who must be or was told of all erasures, oldest first, or of one."""
    given = recipients.recipients(ledger)
    if not given:
        return []
    datasets = {dataset.id: dataset.name for dataset in points.datasets(ledger)}
    dataset_of = {model.name: datasets[model.dataset_id] for model in models.models(ledger, retired=True)}
    told = {(notice.erasure_id, notice.recipient_id): notice for notice in recipients.notices(ledger)}
    by_erasure: dict[str, list[Request]] = {}
    for request in erasures.all_requests(ledger) if erasure_id is None else erasures.requests_of(ledger, erasure_id):
        by_erasure.setdefault(request.erasure_id, []).append(request)
    found: list[tuple[str, Telling]] = []
    rules = _rules(ledger, [request.id for requests in by_erasure.values() for request in requests])
    for erasure, requests in by_erasure.items():
        ended = erasures.erasure_by_id(ledger, erasure).influence_removed_at
        if ended is None:
            continue
        for recipient in given:
            if recipient.given_at > ended or (recipient.ended_at is not None and recipient.ended_at < ended):
                continue
            mine = tuple(
                r.id
                for r in requests
                if rules[r.id].upon and _concerns(r, recipient.model, dataset_of[recipient.model])
            )
            if mine:
                said = told.get((erasure, recipient.id), Notice(erasure, recipient.id, "", "", ""))
                found.append((ended, Telling(recipient, erasure, mine, said.outcome, said.reason, said.at)))
    return [telling for _, telling in sorted(found, key=lambda pair: (pair[0], pair[1].erasure))]


def tell(ledger: Ledger, plugins: Plugins, folder: Path, clock: Clock) -> list[Telling]:
    """Have plugins tell everybody who is still to be told; return those, with what came of it.

    One at a time: whoever begins while another is at it waits, and then looks at what is left, so that nobody is told
    twice.
    """
    with hold(ledger, [telling_lease()], clock):
        owed = [one for one in tellings(ledger) if one.owed]
        for one in owed:
            whom = one.recipient
            outcome, by = plugins.tell(whom.name, whom.model, one.erasure, one.requests, folder)
            try:
                check_excuse(ledger, one, outcome)
            except RefusedError:
                outcome = "failed"
            record(ledger, [(one, outcome, by)], clock())
    asked = {(one.erasure, one.recipient.id) for one in owed}
    return [one for one in tellings(ledger) if (one.erasure, one.recipient.id) in asked]


def recipient_named(ledger: Ledger, given: str) -> Recipient:
    """Return the one recipient whose id begins so."""
    found = [one for one in recipients.recipients(ledger) if given and one.id.startswith(given)]
    if len(found) != 1:
        raise NotFoundError(f"{'no' if not found else 'more than one'} recipient's id begins with '{given}'")
    return found[0]


def record(ledger: Ledger, told: Iterable[tuple[Telling, str, str]], now: datetime) -> None:
    """Record what came of tellings: the outcome and who says so."""
    at = stamp(now)
    recipients.enter_notices(ledger, [Notice(t.erasure, t.recipient.id, what, why, at) for t, what, why in told])


def check_outcome(outcome: str) -> None:
    """Raise unless a person may record such an outcome."""
    if outcome not in OUTCOMES:
        raise InputError(f"no outcome '{outcome}'; there are: {', '.join(OUTCOMES)}")


def check_excuse(ledger: Ledger, telling: Telling, outcome: str) -> None:
    """Raise `RefusedError` where a policy does not take this as a reason for telling nobody."""
    for request_id, rule in _rules(ledger, telling.requests).items() if outcome in EXCUSES else ():
        if outcome not in rule.unless:
            taken = ", ".join(rule.unless) or "none"
            raise RefusedError(
                f"under the policy of request {request_id[:12]} a recipient must be told, and '{outcome}' is no reason "
                f"not to ({rule.cite}); reasons it takes: {taken}"
            )


def _rules(ledger: Ledger, ids: Iterable[str]) -> dict[str, TellRecipients]:
    """Return by request what its policy, as it was then, says about telling recipients."""
    with ledger.read() as connection:
        entries = dockets.by_ids(connection, list(ids))
        digests = {entry.policy_digest for entry in entries.values()}
        kept = {digest: policy_of_digest(connection, digest) or load_policy(DEFAULT) for digest in digests}
    return {entry.id: kept[entry.policy_digest].notify.recipients for entry in entries.values()}


def _concerns(request: Request, model: str, dataset: str) -> bool:
    """Say whether a request erased points that a model may have seen, or the model itself."""
    outcome: Mapping[str, Any] = request.outcome or {}
    if model in outcome.get("retired", ()):
        return True
    return any(lost["dataset"] == dataset and lost["root_before"] for lost in outcome.get("slices", ()))
