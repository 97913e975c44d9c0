"""`python -m samestep.jax`: shows how to use samestep in JAX programs, and checks whether it works here."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence

from samestep._util import jax_variables
from samestep.errors import Error


def main(argv: Sequence[str] | None = None) -> int:
    """Prints what was asked for; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m samestep.jax",
        description="Print the variables that let JAX programs of several processes on CPU use samestep: "
        'eval "$(python -m samestep.jax)"',
    )
    asked = parser.add_mutually_exclusive_group()
    asked.add_argument("--library", action="store_true", help="print the path of the library alone")
    asked.add_argument(
        "--check", action="store_true", help="run every collective on two processes and tell what works"
    )
    flags = parser.parse_args(argv)
    try:
        if flags.check:
            from samestep.jax import check

            return check.main()
        if flags.library:
            print(jax_variables.library())
        else:
            for name, value in jax_variables.environment({}).items():
                print(f"export {name}={shlex.quote(value)}")
    except Error as error:
        print(f"samestep.jax: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
