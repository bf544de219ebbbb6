"""Read somebody else's object once, by path or URL, without trusting how long it says it is."""

from collections.abc import Callable

import fsspec

from unlearnd.errors import InputError, NotFoundError, StorageError, UnlearndError, behind_absence

_BEGINNING, _PORTION = 1 << 16, 1 << 22


def read_elsewhere(url: str, what: str, most: int, look: Callable[[bytes], None]) -> bytes:
    """Return the bytes of somebody else's object, no more than `most` of them.

    `look` is shown its beginning, some kilobytes, before the rest is read, and may raise.
    """
    parts: list[bytes] = []
    size = 0
    try:
        with fsspec.open(url, "rb") as file:
            while part := file.read(_PORTION if parts else _BEGINNING):
                if not parts:
                    look(part)
                parts.append(part)
                size += len(part)
                if size > most:
                    raise InputError(f"the {what} {url} has more than {most >> 30} GiB")
    except UnlearndError:
        raise
    except (FileNotFoundError, IsADirectoryError) as error:
        if (cause := behind_absence(error)) is not None:
            raise StorageError(f"the {what} {url} cannot be read: {cause}") from error
        raise NotFoundError(f"there is no file {url} to be the {what}") from None
    except OSError as error:
        raise StorageError(f"the {what} {url} cannot be read: {error.strerror or error}") from error
    except Exception as error:
        # File systems are fsspec's plugins, and each raises errors of its own.
        raise StorageError(f"the {what} {url} cannot be read: {type(error).__name__}: {error}") from error
    if not parts:
        raise InputError(f"the {what} {url} is empty")
    return b"".join(parts)
