"""Run the command line as `python -m prefixbank`."""

import sys

from prefixbank.cli import main

if __name__ == "__main__":
    sys.exit(main())
