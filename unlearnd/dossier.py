"""The evidence pack of one receipt: a folder for the person, or for an authority.

It holds the receipt, the documents behind it, the trust file, a page a person can read and print, and the
command that checks it all. The page has no script and needs nothing from outside.
"""

import base64
import html
import json
from collections.abc import Mapping
from typing import Any

NOTHING_FROM_OUTSIDE = (
    """<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">"""
)
"""In the head of a page: a browser runs no script in it and fetches nothing for it, whatever came to stand there."""

_STYLE = (
    "body{font:16px/1.5 Georgia,serif;max-width:42em;margin:3em auto;padding:0 1em;color:#111}"
    "h1{font-size:1.5em}table{border-collapse:collapse;width:100%;margin:1em 0}"
    "td{border-top:1px solid #999;padding:.35em .5em;vertical-align:top}td:first-child{width:14em}"
    "pre{font-size:.85em;white-space:pre-wrap;overflow-wrap:anywhere}@media print{body{margin:0}}"
)
_ASKED = {
    "user": "one person",
    "point": "one point",
    "dataset": "a whole dataset, and every model trained on it",
    "model": "a whole model",
}
_LIMITS = (
    "that no copy exists outside this store: backups, exports, models made elsewhere",
    "that the request was logged when it arrived",
    "that every row about the person was registered under the person's id",
    "from the weights alone, that the data had no influence: for that, the training must be run again (replay)",
)


def summary_page(receipt: bytes, command: str) -> bytes:
    """Return one page that says what a receipt says."""
    said = predicate_of(receipt)
    rows: list[tuple[str, str]] = [
        ("Request", said["requestId"]),
        ("Asked for", _ASKED[said["asked"]]),
        ("Received", said["request"]["receivedAt"]),
        ("Due", said["request"]["dueAt"]),
        ("Influence removed", said["influenceRemovedAt"]),
        ("Points erased", _points(said)),
        ("Slices rewritten", f"{said['slices']['count']:,}"),
        ("Checkpoints destroyed", f"{said['checkpoints']['destroyed']['count']:,}"),
        *_kept(said),
        ("To train again", f"{said['samples']['retrain']:,} of {said['samples']['fromScratch']:,} samples"),
        ("Can be replayed", "bit for bit" if said["replay"] == "bit-exact" else "no"),
        ("Store", said["storeId"]),
        ("Made by", f"{said['software']['name']} {said['software']['version']}"),
    ]
    table = "".join(f"<tr><td>{html.escape(a)}</td><td>{html.escape(b)}</td></tr>" for a, b in rows)
    limits = "".join(f"<li>{html.escape(limit)}</li>" for limit in _LIMITS)
    # One option a line: a browser would break the line inside of one.
    lines = command.replace(" --", " \\\n  --")
    page = (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8">{NOTHING_FROM_OUTSIDE}'
        f"<title>Erasure receipt</title><style>{_STYLE}</style></head><body><h1>Erasure receipt</h1>"
        "<p>The operator of this store states, signed and entered in its transparency log:</p>"
        f"<table>{table}</table>"
        f"<h2>To check it</h2><pre>{html.escape(lines)}</pre>"
        "<p>The check needs no access to the operator's systems. Take the trust file from where the operator "
        "publishes it, not from this folder.</p>"
        f"<h2>What a receipt cannot prove</h2><ul>{limits}</ul></body></html>\n"
    )
    return page.encode()


def _points(said: Mapping[str, Any]) -> str:
    if said["asked"] == "model":
        return "none: a model was to go, and no data"
    return f"{said['erased']['points']:,}" if said["found"] else "none: the store held no such data"


def _kept(said: Mapping[str, Any]) -> list[tuple[str, str]]:
    kept = said.get("objects", {}).get("kept", {}).get("count", 0)
    return [("NOT destroyed", f"{kept:,} versions of objects that the storage did not let go")] if kept else []


def predicate_of(receipt: bytes) -> Mapping[str, Any]:
    """Return what a receipt of ours says."""
    envelope = json.loads(receipt)["envelope"]
    predicate: Mapping[str, Any] = json.loads(base64.b64decode(envelope["payload"]))["predicate"]
    return predicate


def proof_of(receipt: bytes) -> str:
    """Return the proof of a receipt of ours; its last part is the signed tree head."""
    return str(json.loads(receipt)["proof"])
