"""A store's settings file, `unlearnd.toml`.

It says where ledger and storage are and how to build. It holds no secret, so it may be read by anyone who may
see the store. Paths in it are relative to the folder it is in, so that a store can be moved as a whole.
"""

import json
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from unlearnd.errors import DamagedStoreError, InputError, NotFoundError

FILE_NAME = "unlearnd.toml"
_SECTIONS: dict[str, dict[str, type]] = {
    "store": {"id": str, "ledger": str, "storage": str, "receipts": str},
    "build": {"executor": str, "workers": int, "device": str},
    "keys": {"signer": str, "wrapper": str},
    "policy": {"policy": str, "policies": str},
    "storage": {
        "endpoint_url": str,
        "region": str,
        "addressing_style": str,
        "checksums": str,
        "attempts": int,
        "options": dict,
    },
    # What the executor is told; it alone knows its entries.
    "executor": {},
}
_FREE = ("executor",)
_OPTIONAL = ("receipts",)
_SECRET = re.compile(r"secret|passw|token|credential|access_?key|(^|_)(key|sas|auth)($|_)", re.I)


@dataclass(frozen=True)
class Config:
    """What `unlearnd.toml` says."""

    store_id: str
    ledger: str
    storage: str
    executor: str = "serial"
    workers: int = 1
    device: str = "auto"
    signer: str = "file"
    wrapper: str = "none"
    """Who wraps the keys of encrypted objects; `none`: nothing is encrypted."""
    policy: str = "default"
    """The policy of requests that name none."""
    policies: str = "policies"
    """The folder of the store's own policies, where there is one."""
    storage_options: Mapping[str, Any] = field(default_factory=dict)
    """What `[storage]` says: how to reach the storage. Never a secret."""
    receipts: str | None = None
    """Where receipts and their documents go; None: to the storage."""
    executor_options: Mapping[str, Any] = field(default_factory=dict)
    """What `[executor]` says: for the executor to check. Never a secret."""

    def seen_from(self, folder: Path) -> "Config":
        """Return the same settings with addresses that hold wherever they are read, for a store in `folder`."""
        receipts = None if self.receipts is None else storage_url(folder, self.receipts)
        return replace(
            self,
            ledger=ledger_url(folder, self.ledger),
            storage=storage_url(folder, self.storage),
            receipts=receipts,
        )


def read_config(folder: Path) -> Config:
    """Read the settings of the store in `folder`."""
    path = folder / FILE_NAME
    try:
        given = tomllib.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError):
        raise NotFoundError(f"no store in {folder}: there is no {FILE_NAME}; `unlearnd init` makes one") from None
    except (OSError, ValueError) as error:
        raise DamagedStoreError(f"{path} cannot be read: {error}") from error
    for section, entries in given.items():
        known = _SECTIONS.get(section)
        if known is None or not isinstance(entries, dict):
            raise DamagedStoreError(f"{path} has an unknown section '{section}'; known: {', '.join(_SECTIONS)}")
        for name, value in entries.items() if section not in _FREE else ():
            if section == "storage":
                _check_name(name)
            if name not in known or type(value) is not known[name] or (isinstance(value, int) and value < 1):
                raise DamagedStoreError(
                    f"{path}: [{section}] {name} is not a setting or cannot be {value!r}; "
                    f"settings: {', '.join(f'{n} ({t.__name__})' for n, t in known.items())}"
                )
    store = given.get("store", {})
    missing = [name for name in _SECTIONS["store"] if name not in store and name not in _OPTIONAL]
    if missing:
        raise DamagedStoreError(f"{path}: [store] lacks {', '.join(missing)}")
    check_no_secret(given.get("storage", {}), store["storage"], store.get("receipts", ""))
    for name, _ in _leaves(given.get("executor", {})):
        if _SECRET.search(name.rpartition(".")[2]):
            raise InputError(
                f"the entry {name} of [executor] is a secret, which {FILE_NAME} must not hold: take it out and give it "
                "in the environment"
            )
    return Config(
        store_id=store["id"],
        ledger=store["ledger"],
        storage=store["storage"],
        **given.get("build", {}),
        **given.get("keys", {}),
        **given.get("policy", {}),
        storage_options=given.get("storage", {}),
        receipts=store.get("receipts"),
        executor_options=given.get("executor", {}),
    )


def check_storage_options(options: Mapping[str, Any]) -> None:
    """Raise `InputError` unless these are entries that `[storage]` may have."""
    known = _SECTIONS["storage"]
    for name, value in options.items():
        _check_name(name)
        if name not in known or type(value) is not known[name] or (isinstance(value, int) and value < 1):
            raise InputError(
                f"the storage option {name} is not known or cannot be {value!r}; "
                f"options: {', '.join(f'{n} ({t.__name__})' for n, t in known.items())}"
            )


def check_no_secret(options: Mapping[str, Any], *urls: str) -> None:
    """Raise `InputError` where storage options or addresses hold a secret: they are kept where many may read them."""
    given = {**options, **{f"address {number}": url for number, url in enumerate(urls)}}
    for name, value in _leaves(given):
        _check_name(name)
        if isinstance(value, str) and re.search(r"://[^/@]*:[^/@]*@", value):
            raise InputError(
                f"the address of the storage has a password in it, which {FILE_NAME} must not hold: take it out and "
                "give it in the environment"
            )


def _check_name(name: str) -> None:
    """Raise `InputError` for an option that is a secret by its name; the value is not repeated."""
    if _SECRET.search(name.rpartition(".")[2]):
        raise InputError(
            f"the storage option {name} is a secret, which {FILE_NAME} must not hold: take it out and give it in "
            "the environment (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or FSSPEC_…)"
        )


def check_address(url: str) -> None:
    """Raise `InputError` for a storage address that would be taken for another place than is meant."""
    scheme, apart, place = url.partition("://")
    if not apart and re.match(r"[a-z][a-z0-9+.-]+:/", url):
        raise InputError(f"{url} is neither a folder nor an address: after the colon come two slashes")
    if apart and ".." in place.split("/"):
        raise InputError(f"the address {url} has '..' in it: write the place itself")
    if scheme in ("s3", "s3a") and apart and not place.strip("/"):
        raise InputError(f"the address {url} names no bucket: write s3://bucket/prefix")


def _leaves(given: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in given.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value


def write_config(folder: Path, config: Config) -> None:
    """Write the settings of a new store."""
    lines = [
        "# Where this store keeps its ledger and its bytes; paths are relative to this file.",
        "[store]",
        f"id = {_quoted(config.store_id)}",
        f"ledger = {_quoted(config.ledger)}",
        f"storage = {_quoted(config.storage)}",
        *([f"receipts = {_quoted(config.receipts)}"] if config.receipts else []),
        "",
        "# How models are built: executor `serial`, `processes`, `ray`, …; device `auto`, `cpu`, `cuda`, …",
        "[build]",
        f"executor = {_quoted(config.executor)}",
        f"workers = {config.workers}",
        f"device = {_quoted(config.device)}",
        "",
        "# Who signs tree heads and receipts: `file`, or a plugin's signer for a key service.",
        "[keys]",
        f"signer = {_quoted(config.signer)}",
        *([f"wrapper = {_quoted(config.wrapper)}"] if config.wrapper != "none" else []),
        "",
        "# Which policy counts for requests that name none, and the folder of policies of your own.",
        "[policy]",
        f"policy = {_quoted(config.policy)}",
        f"policies = {_quoted(config.policies)}",
    ]
    if config.storage_options:
        lines += ["", "# How to reach the storage. Secrets come from the environment, never from here.", "[storage]"]
        lines += [f"{name} = {_value(value)}" for name, value in config.storage_options.items()]
    if config.executor_options:
        lines += ["", "# What the executor is told.", "[executor]"]
        lines += [f"{name} = {_value(value)}" for name, value in config.executor_options.items()]
    (folder / FILE_NAME).write_text("\n".join(lines) + "\n")


def ledger_url(folder: Path, url: str) -> str:
    """Return the address of the ledger of the store in `folder`."""
    relative = url.removeprefix("sqlite:///")
    return url if relative == url or relative.startswith("/") else f"sqlite:///{folder / relative}"


def storage_url(folder: Path, url: str) -> str:
    """Return the address of a storage of the store in `folder`."""
    return url if "://" in url else str(folder / url)


def own_policies(folder: Path) -> Path:
    """Return the folder of the policies that the store in `folder` adds; it need not be there."""
    return folder / read_config(folder).policies


def change_ledger(folder: Path, url: str) -> None:
    """Have the settings of a store name another ledger, and leave everything else in them as it is."""
    path = folder / FILE_NAME
    changed, count = re.subn(r"(?m)^ledger\s*=.*$", lambda _: f"ledger = {_quoted(url)}", path.read_text(), count=1)
    beside = path.with_name(f"{FILE_NAME}.part")
    beside.write_text(changed)
    with beside.open("rb") as written:
        os.fsync(written.fileno())
    if not count or tomllib.loads(changed)["store"]["ledger"] != url:
        beside.unlink()
        raise DamagedStoreError(f"{path}: the line of [store] ledger cannot be found; write it by hand: {_quoted(url)}")
    beside.replace(path)
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def find_store(start: Path) -> Path:
    """Return the nearest folder at or above `start` that holds a store."""
    for folder in (start, *start.parents):
        if (folder / FILE_NAME).is_file():
            return folder
    raise NotFoundError(
        f"no store here: neither {start} nor a folder above it has an {FILE_NAME}; "
        "name one with --store or UNLEARND_STORE, or make one with `unlearnd init DIR`"
    )


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_quoted(name)} = {_value(inner)}" for name, inner in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_value, value)) + "]"
    return _quoted(value) if isinstance(value, str) else json.dumps(value)


def _quoted(text: str) -> str:
    # A JSON string is a TOML string too, but for the one control character that JSON lets stand.
    return json.dumps(text).replace("\x7f", "\\u007f")
