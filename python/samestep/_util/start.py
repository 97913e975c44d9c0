"""Runs one module of samestep as a program: `python start.py launch.agent`, also where `-S` hides the package."""

import importlib
import os
import sys

if __name__ == "__main__":
    here = os.path.dirname(os.path.abspath(__file__))
    # At the end, and not this folder: or modules there could hide those of the standard library.
    sys.path = [*(entry for entry in sys.path if entry != here), os.path.dirname(os.path.dirname(here))]
    sys.exit(importlib.import_module(f"samestep.{sys.argv[1]}").main())
