"""`python -m dray`."""

from dray.cli import main

if __name__ == "__main__":
    main()
