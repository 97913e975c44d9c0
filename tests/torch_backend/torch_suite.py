"""torch's own tests of its backends, as torch ships them, on this one: 3 ranks, tensors of the host.

    python tests/torch_backend/torch_suite.py NAME...   # these tests
    python tests/torch_backend/torch_suite.py --all     # those that must pass, by torch_suite_names.txt
    python tests/torch_backend/torch_suite.py --quick   # of those, what each run of pytest runs
    python tests/torch_backend/torch_suite.py --list    # prints the names of all tests that torch has
    BACKEND=gloo python ...                             # the same on another backend

Prints a line for each: OK, FAIL or SKIP, the name, seconds, and why; exits with 1 unless all are OK. Some tests ask
for a backend by its name before they run; that question is left out.
"""

import inspect
import os
import sys
import tempfile
import time
import unittest
from pathlib import Path

os.environ.setdefault("BACKEND", "samestep")
os.environ.setdefault("WORLD_SIZE", "3")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("DISTRIBUTED_TESTS_DEFAULT_TIMEOUT", "60")
os.environ["CUDA_VISIBLE_DEVICES"] = ""
TEMPORARY = tempfile.TemporaryDirectory(prefix="torch_suite")
os.environ["TEMP_DIR"] = TEMPORARY.name

import samestep.torch  # noqa: E402
import torch  # noqa: E402
from torch.testing._internal.common_distributed import DistTestCases  # noqa: E402

samestep.torch.register()
for feature in ("ddp", "subgroup", "plugin"):
    DistTestCases.backend_feature.setdefault(feature, set()).add(os.environ["BACKEND"])

from torch.testing._internal.distributed import distributed_test  # noqa: E402


class Suite(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
    """Ranks are forked from this process, which has imported torch already."""

    def setUp(self):
        super().setUp()
        self._start_processes(torch.multiprocessing.get_context("fork").Process)

    def run_test(self, test_name, parent_pipe):
        if (
            "accumulate_gradients_no_sync" in test_name
        ):  # takes its branch for the host by the names of two backends
            distributed_test.BACKEND = "gloo"
        super().run_test(test_name, parent_pipe)


NAMES = unittest.TestLoader().getTestCaseNames(Suite)


def run(name):
    """Status, and what there is to say."""
    plain = inspect.unwrap(inspect.getattr_static(Suite, name))

    def unasked(self):  # without the marks of the function, too
        plain(self)

    test = type("Suite", (Suite,), {name: unasked})(name)
    result = unittest.TestResult()
    test.run(result)
    if result.skipped:
        return "SKIP", result.skipped[0][1]
    wrong = [text for _, text in (*result.failures, *result.errors)]
    return ("FAIL", wrong[0]) if wrong else ("OK", "")


def chosen(words):
    if words not in (["--all"], ["--quick"]):
        return words
    marks = "+" if words == ["--quick"] else "+ "
    lines = Path(__file__).with_name("torch_suite_names.txt").read_text().splitlines()
    return [line[2:] for line in lines if line[0] in marks]


def main(words):
    if words == ["--list"]:
        print(*NAMES, sep="\n")
        return 0
    Suite.setUpClass()
    failed = False
    for name in chosen(words):
        begin = time.monotonic()
        status, text = run(name)
        failed = failed or status != "OK"
        why = " | ".join(text.strip().splitlines()[-12:])
        print(status, name, f"{time.monotonic() - begin:.1f}", why, flush=True)
    return int(failed)


if __name__ == "__main__":
    code = main(sys.argv[1:])
    TEMPORARY.cleanup()
    sys.exit(code)
