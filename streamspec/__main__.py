"""`python -m streamspec` is the command `streamspec`."""

from streamspec.cli import main

if __name__ == "__main__":
    main()
