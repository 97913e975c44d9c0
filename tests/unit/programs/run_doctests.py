"""Runs the examples in the docstrings of modules: `run_doctests.py modules`."""

import doctest
import importlib
import sys

import samestep

failed = 0
for name in sys.argv[1:]:
    failed += doctest.testmod(importlib.import_module(name)).failed
    samestep.finalize()
sys.exit(failed > 0)
