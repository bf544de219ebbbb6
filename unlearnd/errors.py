"""Everything that can go wrong, cut by what the person reading the message must do next.

    UnlearndError               exit 1
    ├── InputError              what was given cannot be used: mend the file, the row or the setting named
    ├── NotFoundError           no store, dataset, model, backend or file by that name
    ├── RefusedError            the store says no: it would overwrite, contradict or lose something
    ├── BusyError               another process is at it: try again later
    ├── StorageError            storage or ledger cannot be read or written: disk, rights, network
    ├── DamagedStoreError       stored bytes and the ledger disagree: stop, never repair in passing
    ├── VerificationError       exit 3: what was shown does not prove what it claims; do not rely on it
    │   ├── FormatError         not the format it should be: malformed, too large, not canonical
    │   ├── SignatureError      not signed by whom it should be
    │   └── InclusionError      not in the log, or not in the same log
    └── PluginError             an installed plugin is at fault; the message names it
        └── BackendError        a backend raised while training or answering; the original is the cause

Messages name the thing and both sides (what was asked, what there is) and never hold a user id or a value
of somebody's data: they end up in logs.
"""

STOPPED = "stopped; nothing is lost, run the command again to go on"
"""What is said to whoever interrupts a command."""


class UnlearndError(Exception):
    """Base of all errors meant for people; its text is one clear sentence."""

    exit_code = 1


class InputError(UnlearndError):
    """What was given cannot be used."""


class NotFoundError(UnlearndError):
    """There is nothing by that name."""


class RefusedError(UnlearndError):
    """The store says no."""


class BusyError(UnlearndError):
    """Another process holds what this one needs."""


class StorageError(UnlearndError):
    """Storage or ledger could not be read or written."""


class DamagedStoreError(UnlearndError):
    """Stored bytes and the ledger disagree."""


class VerificationError(UnlearndError):
    """What was shown does not prove what it claims."""

    exit_code = 3


class FormatError(VerificationError):
    """Not the format it should be."""


class SignatureError(VerificationError):
    """Not signed by whom it should be."""


class InclusionError(VerificationError):
    """Not in the log, or not in the same log."""


class PluginError(UnlearndError):
    """An installed plugin is at fault."""


class BackendError(PluginError):
    """A backend raised while training or answering."""


def behind_absence(error: OSError) -> Exception | None:
    """Return what fsspec took for a missing file: over HTTP, a server that is not there or says no; else None."""
    cause = error.__cause__
    if not isinstance(cause, Exception) or isinstance(cause, FileNotFoundError):
        return None
    return None if getattr(cause, "status", None) in (404, 410) else cause
