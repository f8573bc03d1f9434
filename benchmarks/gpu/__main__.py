"""`python3 benchmarks/gpu`: what a GPU says of dray. suite.py has the options."""

from __future__ import annotations

import os
import sys

import suite

if __name__ == "__main__":
    code = suite.main()
    sys.stdout.flush()
    os._exit(code)
