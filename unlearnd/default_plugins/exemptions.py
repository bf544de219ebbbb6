"""Users who must not be erased before a day, whenever they ask: a list kept beforehand, as for a claim at law.

One line per user in the store's `exemptions.csv`: keyed handle, basis, and the day until which it counts. `unlearnd
requests exempt` writes it; whoever holds the file learns no user id. A request about somebody on it is put on hold when
it is about to be carried out.
"""

import csv
import os
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path

from unlearnd.errors import DamagedStoreError, StorageError
from unlearnd.hookspecs import Petition, Veto

FILE_NAME = "exemptions.csv"


def read_exemptions(folder: Path) -> dict[str, tuple[str, date]]:
    """Return basis and last day by handle; nothing where there is no list."""
    path = folder / FILE_NAME
    try:
        with path.open(newline="", encoding="utf-8") as file:
            return {row["handle"]: (row["basis"], date.fromisoformat(row["until"])) for row in csv.DictReader(file)}
    except FileNotFoundError:
        return {}
    except (OSError, KeyError, TypeError, ValueError):
        # Carrying requests out without the list could erase what a court wants kept.
        raise DamagedStoreError(f"{path} cannot be read as lines of handle, basis and until: mend it first") from None


def write_exemptions(folder: Path, exempt: Mapping[str, tuple[str, date]]) -> None:
    """Write the list, whole or not at all."""
    path, fresh = folder / FILE_NAME, folder / f".{FILE_NAME}.new"
    try:
        with fresh.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(["handle", "basis", "until"])
            writer.writerows([handle, basis, until] for handle, (basis, until) in sorted(exempt.items()))
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror}") from error


def vetoes(petitions: Sequence[Petition], folder: Path, today: date) -> list[Veto]:
    """Return a veto for every petition about somebody on the list."""
    exempt = read_exemptions(folder)
    if not exempt:
        return []
    return [
        Veto(number, *exempt[petition.handle])
        for number, petition in enumerate(petitions)
        if petition.handle in exempt and exempt[petition.handle][1] > today
    ]
