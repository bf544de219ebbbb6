"""`python -m unlearnd` is `unlearnd`."""

from unlearnd.cli import main

if __name__ == "__main__":
    main()
