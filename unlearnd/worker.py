"""A build worker: `python -m unlearnd.worker`, started by an executor.

Reads one task as a line of JSON, opens the store by itself, builds, and says in lines of JSON how it goes.
Its input stays open for as long as somebody wants the work: when it closes, the worker ends at once. Nothing
is lost by that; every checkpoint already entered stays.
"""

import json
import os
import sys
import threading
from dataclasses import asdict

from unlearnd.errors import UnlearndError
from unlearnd.executors import read_task
from unlearnd.hookspecs import Progress
from unlearnd.store import Store


def main() -> None:
    task = read_task(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, name="parent watch", daemon=True).start()
    # Whatever a library prints must not get between our lines.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def report(progress: Progress) -> None:
        answers.write(json.dumps(asdict(progress)) + "\n")

    try:
        with Store.open(task.store) as store:
            store.work(task, report)
    except UnlearndError as error:
        answers.write(json.dumps({"error": type(error).__name__, "message": str(error)}) + "\n")
    else:
        answers.write(json.dumps({"done": True}) + "\n")


def _end_with_parent() -> None:
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    main()
