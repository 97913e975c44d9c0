"""Runs one module of samestep as a program: `python start.py launch.agent`.

It makes the module importable without running `samestep/__init__.py`: such a program needs neither NumPy nor
the compiled core, and so starts in a few milliseconds.
"""

import importlib
import os
import sys
import types

if __name__ == "__main__":
    here = os.path.dirname(os.path.abspath(__file__))
    if sys.path[0] == here:  # or a module here could hide one of the standard library
        del sys.path[0]
    package = types.ModuleType("samestep")
    package.__path__ = [os.path.dirname(here)]
    sys.modules["samestep"] = package
    sys.exit(importlib.import_module(f"samestep.{sys.argv[1]}").main())
