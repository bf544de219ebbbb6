"""Whom and what an erasure is about: users, points, whole datasets and models.

Raw user ids come in here, and go no further than the keyed handles they become; the openings that prove to whom a
receipt belongs are handed out and not kept.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from unlearnd.erasure import Target
from unlearnd.errors import InputError
from unlearnd.ledger import dockets, erasures, models, points
from unlearnd.ledger.dockets import Entry
from unlearnd.ledger.erasures import Request
from unlearnd.opened import Opened
from unlearnd.receipts import OPENING_TYPE, canonical


@dataclass(frozen=True, repr=False)
class Opening:
    """A user id and the nonce that opens a receipt's commitment to it. Not shown when printed."""

    request: str
    user: str
    nonce: bytes

    def as_bytes(self) -> bytes:
        """Return the private file that the user gets."""
        return canonical(
            {"mediaType": OPENING_TYPE, "requestId": self.request, "user": self.user, "nonce": self.nonce.hex()}
        )


def targets_of(store: Opened, users: Iterable[str | int], given: Iterable[str]) -> list[Target]:
    listed = [users] if isinstance(users, str | int) else list(users)
    handles: list[Target] = list(store.keys.handles([user_id(user) for user in listed]))
    single = [point_at(point) for point in ([given] if isinstance(given, str) else given)]
    for name in {name for name, _ in single}:
        points.dataset_named(store.ledger, name)
    targets = handles + single
    if not targets:
        raise InputError("nobody to erase: give at least one user or point")
    return list(dict.fromkeys(targets))


def order_about(store: Opened, kind: str, name: str) -> Target:
    """Return what an order is about; raise `NotFoundError` unless it is there."""
    if kind == "dataset":
        points.dataset_named(store.ledger, name)
    else:
        models.model_named(store.ledger, name)
    return kind, name


def openings_of(store: Opened, named: Mapping[Target, str]) -> dict[str, Opening]:
    """Return the openings of these users' requests that are not carried out yet."""
    handles = [handle for handle in named if isinstance(handle, bytes)]
    begun = erasures.last_requests(store.ledger, handles, [])
    with store.ledger.read() as connection:
        waiting = dockets.open_by_handles(connection, handles)
    known: list[Request | Entry] = [*begun.values(), *waiting.values()]
    return {
        found.id: Opening(found.id, named[found.handle], found.nonce)
        for found in known
        if found.nonce is not None and found.handle is not None
    }


def user_id(user: str | int) -> str:
    if isinstance(user, bool) or not isinstance(user, str | int | np.integer) or not str(user):
        raise InputError("a user id is a non-empty string or an integer")
    text = str(user)
    if not text.isascii() and not text.encode(errors="ignore").decode() == text:
        raise InputError("the user id is not proper text: it has half a character in it")
    return text


def point_at(point: str) -> tuple[str, int]:
    name, _, position = point.rpartition(":")
    if not name or not (position.isascii() and position.isdigit() and len(position) < 19):
        raise InputError("a point is written dataset:position, like digits:1234")
    return name, int(position)
