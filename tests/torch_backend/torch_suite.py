"""torch's own tests of its backends, as torch ships them, on this one: 3 ranks, tensors of the host.

    python tests/torch_backend/torch_suite.py NAME...   # these tests
    python tests/torch_backend/torch_suite.py --all     # those that must pass, by torch_suite_names.txt
    python tests/torch_backend/torch_suite.py --list    # prints the names of all tests that torch has
    BACKEND=gloo python ...                             # the same on another backend
    HOW=h python ... NAME...                            # what is not on the list: with the host in GPUs' place

Prints a line for each: OK, FAIL or SKIP, the name, seconds, and why; exits with 1 unless all are OK. Some tests ask
for a backend by its name before they run; that question is left out.
"""

import inspect
import os
import subprocess
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
from torch.testing._internal import common_distributed  # noqa: E402

samestep.torch.register()
for feature in ("ddp", "subgroup", "plugin"):
    common_distributed.DistTestCases.backend_feature.setdefault(feature, set()).add(os.environ["BACKEND"])

from torch.testing._internal.distributed import distributed_test  # noqa: E402


class Suite(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
    """Ranks are forked from this process, which has imported torch already."""

    waits_on_host = False

    def setUp(self):
        super().setUp()
        self._start_processes(torch.multiprocessing.get_context("fork").Process)

    def run_test(self, test_name, parent_pipe):
        if (
            "accumulate_gradients_no_sync" in test_name
        ):  # takes its branch for the host by the names of two backends
            distributed_test.BACKEND = "gloo"
        if self.waits_on_host:
            put_the_host_in_the_place_of_gpus()
        super().run_test(test_name, parent_pipe)


class HostStream(torch.Stream):
    """A stream of the host, whatever the arguments."""

    def __new__(cls, *_, **__):
        return super().__new__(cls, device="cpu")


def put_the_host_in_the_place_of_gpus():
    """In this process, which ends with the test."""

    def place(device):
        return "cpu" if type(device) is int or str(device).startswith("cuda") else device

    def with_device(function):
        def call(*args, **named):
            if "device" in named:
                named["device"] = place(named["device"])
            return function(*args, **named)

        return call

    def to(plain):
        return lambda self, *args, **named: with_device(plain)(self, *map(place, args), **named)

    for name in ("tensor", "ones", "zeros", "empty", "full", "rand", "randn", "randint", "arange"):
        setattr(torch, name, with_device(getattr(torch, name)))
    for kind in (torch.Tensor, torch.nn.Module):
        kind.to = to(kind.to)
        kind.cuda = lambda self, *args, **named: self
    for name in ("set_device", "synchronize"):
        setattr(torch.cuda, name, lambda *args, **named: None)
    torch.Stream = torch.cuda.Stream = HostStream  # a build for GPUs would make one of theirs
    distributed_test.init_multigpu_helper = lambda size, backend: {r: [r] for r in range(size)}
    ddp = torch.nn.parallel.DistributedDataParallel
    init = ddp.__init__
    ddp.__init__ = lambda self, module, device_ids=None, output_device=None, *args, **named: init(
        self, module, None, None, *args, **named
    )


class Impatient:
    """The module `time`; where torch's tests wait for their processes in steps of 0.1 s, the steps are shorter."""

    def __getattr__(self, name):
        return getattr(time, name)

    def sleep(self, seconds):
        time.sleep(0.005 if seconds == 0.1 else seconds)


distributed_test.time = common_distributed.time = Impatient()
FAIL_ON_THEIR_OWN = {
    "test_new_subgroups_by_enumeration_input_rank_exceeds_world_size",
    "test_static_graph_multi_forward",
}
"""In torch 2.4: over gloo, too."""
NAMES = unittest.TestLoader().getTestCaseNames(Suite)


def run(name, how="+"):
    """Status, and what there is to say."""
    plain = inspect.unwrap(inspect.getattr_static(Suite, name))

    def unasked(self):  # without the decorations of the function, too
        plain(self)

    os.environ["WORLD_SIZE"] = "4" if how == "4" else "3"
    test = type("Suite", (Suite,), {name: unasked, "waits_on_host": how in "h4"})(name)
    result = unittest.TestResult()
    test.run(result)
    if result.skipped:
        return "SKIP", result.skipped[0][1]
    wrong = [text for _, text in (*result.failures, *result.errors)]
    return ("FAIL", wrong[0]) if wrong else ("OK", "")


def listed():
    """The names of the list that must pass, as far as this torch has them, and how."""
    lines = Path(__file__).with_name("torch_suite_names.txt").read_text().splitlines()
    has = set(NAMES) - (FAIL_ON_THEIR_OWN if torch.__version__.startswith("2.4.") else set())
    return {line[2:]: line[0] for line in lines if line[0] in "+h4" and line[2:] in has}


def run_each(names):
    Suite.setUpClass()
    failed = False
    for name in names:
        begin = time.monotonic()
        status, text = run(name, listed().get(name, os.environ.get("HOW", "+")))
        failed = failed or status != "OK"
        why = " | ".join(text.strip().splitlines()[-12:])
        print(status, name, f"{time.monotonic() - begin:.1f}", why, flush=True)
    return int(failed)


def run_all(n_jobs):
    """Side by side, each with a part of the names; the output of one after the other."""
    names, outputs = list(listed()), []
    for i in range(n_jobs):
        command = [sys.executable, __file__, *names[i::n_jobs]]
        output = open(os.path.join(TEMPORARY.name, f"output {i}"), "w+")  # noqa: SIM115
        outputs.append((subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT), output))
    codes = []
    for job, output in outputs:
        codes.append(job.wait())
        output.seek(0)
        print(output.read(), flush=True)
    return int(any(codes))


def main(words):
    if words == ["--list"]:
        print(*NAMES, sep="\n")
        return 0
    return run_all(min(4, os.cpu_count() or 1)) if words == ["--all"] else run_each(words)


if __name__ == "__main__":
    code = main(sys.argv[1:])
    TEMPORARY.cleanup()
    sys.exit(code)
