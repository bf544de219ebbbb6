"""Where `unlearnd` and `python -m unlearnd` begin."""

import gc
import os
import sys


def main() -> None:
    """Run the command that the words of this process name."""
    if sys.argv[1:2] == ["verify"]:
        # What is loaded now stays until the end: looking through it for garbage would find none.
        gc.set_threshold(100_000)
        from unlearnd.verify.command import run  # json, re: others need not wait for them

        code = run(sys.argv[2:])
        if code is not None:
            os._exit(code)  # all is said and flushed, and taking the interpreter apart takes as long as a verdict
    from unlearnd.cli import main as commands  # click

    commands()


if __name__ == "__main__":
    main()
