"""Who must not be erased now: those on hold, and those for whom a plugin says no.

A veto is not an error. It puts the request on hold, by the plugin's name, until a day on which somebody looks again.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from unlearnd import requests
from unlearnd.erasure import Target
from unlearnd.errors import RefusedError
from unlearnd.hookspecs import Petition, Veto
from unlearnd.ledger import dockets, points
from unlearnd.ledger.dockets import Entry
from unlearnd.opened import Opened
from unlearnd.packing import unpack
from unlearnd.policy import Policy
from unlearnd.requests import Asked, petition_of
from unlearnd.restriction import settle
from unlearnd.translog import sign_head


def holds_on(
    store: Opened, targets: Sequence[Target], named: Mapping[Target, str], policy: Policy
) -> dict[Target, str]:
    """Return those on hold, after asking plugins; one that is vetoed and new is received first, then held."""
    with store.ledger.read() as connection:
        handles = [target for target in targets if isinstance(target, bytes)]
        waiting: dict[Target, Entry] = dict(dockets.open_by_handles(connection, handles).items())
        waiting |= {t: e for t, e in dockets.open_of_others(connection).items() if t in targets}
    held = {target: entry.id for target, entry in waiting.items() if entry.state == "on_hold"}
    held |= held_points(store, targets)
    free = [target for target in targets if target not in held]
    petitions = [petition_of(waiting.get(target), target, policy) for target in free]
    for number in {veto.number for _, veto in _vetoes(store, petitions)}:
        target = free[number]
        entry = waiting.get(target)
        if entry is None:
            asked = Asked(target, named.get(target), requester="operator")
            (entry,) = requests.receive(store.ledger, [asked], policy, store.clock(), "operator")
        for request_id in hold_vetoed(store, [entry]):
            held[target] = request_id
    return held


def held_points(store: Opened, targets: Iterable[Target]) -> dict[Target, str]:
    """Return the points among the targets whose user is on hold, each with the request that is."""
    wanted = [target for target in targets if isinstance(target, tuple) and isinstance(target[1], int)]
    on_hold = {e.handle: e.id for e in dockets.entries(store.ledger, ("on_hold",)) if e.handle} if wanted else {}
    names = {dataset.id: dataset.name for dataset in points.datasets(store.ledger)} if on_hold else {}
    found: dict[Target, str] = {}
    for holding in points.holdings_of(store.ledger, list(on_hold)):
        mine = set(unpack(holding.positions).tolist())
        here = [target for target in wanted if target[0] == names[holding.dataset_id] and target[1] in mine]
        found |= dict.fromkeys(here, on_hold[holding.handle])
    return found


def hold_vetoed(store: Opened, entries: Sequence[Entry]) -> list[str]:
    """Ask plugins about requests that are to be carried out; put on hold what one vetoes; return those."""
    rules = store.policy()
    petitions = [petition_of(entry, entry.target, rules) for entry in entries]
    held: list[str] = []
    for plugin, veto in _vetoes(store, petitions):
        entry = entries[veto.number]
        if entry.id not in held:
            last = requests.last_review(store.ledger, entry, store.clock())
            review = last if veto.until is None else min(veto.until, last)
            now, by = store.clock(), f"plugin {plugin}"
            requests.put_on_hold(store.ledger, entry.id, veto.basis, by, review, now, by)
            held.append(entry.id)
    if held:
        settle(store.ledger, store.storage, store.clock)
        sign_head(store.translog)
    return held


def _vetoes(store: Opened, petitions: Sequence[Petition]) -> list[tuple[str, Veto]]:
    """Ask plugins about requests; of an order to destroy a dataset, about everybody who has data in it as well."""
    found = _ask(store, petitions, range(len(petitions)))
    for number, petition in enumerate(petitions):
        if petition.asked == "dataset":
            dataset = points.dataset_named(store.ledger, petition.name)
            for handles in points.users_of(store.ledger, dataset.id):
                asked = [replace(petition, asked="user", handle=handle.hex(), name="") for handle in handles]
                found += _ask(store, asked, [number] * len(asked))
    return found


def _ask(store: Opened, petitions: Sequence[Petition], about: Sequence[int]) -> list[tuple[str, Veto]]:
    """Ask plugins; return their vetoes, each with the number of the request that it is about."""
    said = store.plugins.vetoes(petitions, store.folder, store.clock().date()) if petitions else []
    return [(plugin, replace(veto, number=about[veto.number])) for plugin, veto in said]


def check_nobody_held(store: Opened, name: str) -> None:
    """Raise `RefusedError` while requests on hold keep data of a dataset: a hold outranks an order."""
    dataset = points.dataset_named(store.ledger, name)
    held = {entry.handle: entry.id for entry in dockets.entries(store.ledger, ("on_hold",)) if entry.handle}
    found = {h.handle for h in points.holdings_of(store.ledger, list(held)) if h.dataset_id == dataset.id}
    if found:
        first = min(held[handle] for handle in found)
        raise RefusedError(
            f"dataset '{name}' cannot be destroyed: it has data of {len(found)} users whose requests are on hold, "
            f"the first is {first[:12]}; `unlearnd requests release` lifts a hold"
        )
