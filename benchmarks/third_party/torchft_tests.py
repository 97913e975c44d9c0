"""A module of torchft's own tests, with its `ProcessGroupGloo`, or samestep's class by `SAMESTEP_REPLACE_GLOO=1`.

    python benchmarks/third_party/torchft_tests.py manager_integ_test

Some tests expect an error whose text is gloo's. With samestep's class such a test may fail by the text alone; these are
counted. Every other failure fails the program.
"""

from __future__ import annotations

import importlib
import os
import sys
import unittest

import torchft
from torchft import process_group

OTHER_GROUPS = ("Baby", "Nccl", "nccl", "baby")  # in names of tests: not of ProcessGroupGloo


def tests_of(suite: unittest.TestSuite) -> list[unittest.TestCase]:
    """All but those of other groups."""
    found: list[unittest.TestCase] = []
    for entry in suite:
        if isinstance(entry, unittest.TestSuite):
            found += tests_of(entry)
        elif not any(name in entry.id() for name in OTHER_GROUPS):
            found.append(entry)
    return found


def main(module: str) -> None:
    """Run the tests, and say how many passed."""
    if os.environ.get("SAMESTEP_REPLACE_GLOO") == "1":
        from samestep.torchft import ProcessGroupSamestep

        torchft.ProcessGroupGloo = process_group.ProcessGroupGloo = ProcessGroupSamestep
    theirs = importlib.import_module(
        f"torchft.{module}"
    )  # after the replacement, since it takes the class by name
    tests = tests_of(unittest.defaultTestLoader.loadTestsFromModule(theirs))
    result = unittest.TestResult()
    unittest.TestSuite(tests).run(result)
    problems = [*result.failures, *result.errors]
    texts = [test for test, trace in problems if "AssertionError" in trace and "does not match" in trace]
    for test, trace in problems:
        if test not in texts:
            print(test.id(), trace, file=sys.stderr)
    n_run = len(tests) - len(result.skipped)  # those of CUDA devices skip themselves
    n_passed = n_run - len(problems)
    if len(problems) > len(texts) or not n_passed:
        sys.exit(1)
    also = f", {len(texts)} get an error with another text than gloo's" if texts else ""
    print(f"note: {n_passed} of {n_run} tests pass{also}")


if __name__ == "__main__":
    main(sys.argv[1])
