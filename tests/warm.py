"""Start processes quickly: fork them from one that has imported what is not ours.

    python tests/warm.py keep SOCKET MODULE…              the one that forks; it ends when its input closes
    python -IS tests/warm.py run SOCKET -c SCRIPT …       have it run a script, as `python -c` does
    python -IS tests/warm.py run SOCKET FILE …            have it run FILE, as `python FILE` does

A fresh Python spends half a second, two with torch, on libraries before it comes to unlearnd; tests start hundreds.
The process that is forked has its own id, environment, folder, arguments, input and output, imports unlearnd by itself
and ends as Python ends; `run` ends as it does, by the same signal if it was killed. The libraries are loaded with one
thread, for only then may a process be forked.
"""

import json
import os
import socket
import sys


def keep(path, modules):
    """Fork for all who ask, until input closes; return only in a process that was asked for, with what it is to do."""
    import importlib
    import select

    for module in modules:
        importlib.import_module(module)
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(path)
        door.listen()
        print("ready", flush=True)
        while True:
            asking, _, _ = select.select([door, sys.stdin], [], [])
            if sys.stdin in asking:
                return None
            caller, _ = door.accept()
            if os.fork() == 0:
                break
            caller.close()
            _see_off()
    # Between the two forks stands somebody who waits, and tells the caller.
    with caller:
        said, files, _, _ = socket.recv_fds(caller, 1 << 20, 3)
        while more := caller.recv(1 << 20):
            said += more
        child = os.fork()
        if child:
            ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            caller.sendall(str(ended).encode())
            os._exit(0)
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    return json.loads(said)


def _see_off():
    """Wait for those that have ended, so that what they used is counted."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def become(given):
    """Take on the environment, folder and arguments of the process that was asked for; return what it runs."""
    import types
    from pathlib import Path

    os.environ.clear()
    os.environ.update(given["environment"])
    os.chdir(given["folder"])
    program, *arguments = given["arguments"]
    script = arguments.pop(0) if program == "-c" else Path(program).read_text()
    sys.argv = [program, *arguments]
    # As Python does at its start; the first place was that of this file.
    elsewhere = [place for place in given["environment"].get("PYTHONPATH", "").split(os.pathsep) if place]
    sys.path[:1] = ["" if program == "-c" else os.path.dirname(program), *elsewhere]
    sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    return compile(script, "<string>" if program == "-c" else program, "exec"), main.__dict__


def run(path, arguments):
    """Have a process forked that has our files and all we were given; end as it ends."""
    given = {"arguments": arguments, "environment": dict(os.environ), "folder": os.getcwd()}
    said = json.dumps(given).encode()
    with socket.socket(socket.AF_UNIX) as caller:
        caller.connect(path)
        sent = socket.send_fds(caller, [said], [0, 1, 2])
        caller.sendall(said[sent:])
        caller.shutdown(socket.SHUT_WR)
        ended = int(caller.recv(64))
    if ended < 0:
        os.kill(os.getpid(), -ended)
    sys.exit(ended)


if __name__ == "__main__":
    if sys.argv[1] == "run":
        run(sys.argv[2], sys.argv[3:])
    elif asked := keep(sys.argv[2], sys.argv[3:]):
        exec(*become(asked))
    else:
        _see_off()
