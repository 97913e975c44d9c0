"""Test code that runs on several ranks, with plain `pytest`.

The package brings a pytest plugin that pytest finds by itself. A test says on how many ranks it runs; every
rank runs the same function and asserts for itself:

```python
import numpy as np
import pytest

@pytest.mark.ranks(1, 2, 3)                       # three tests: on 1, 2 and 3 ranks
def test_sum(group):                              # the world of these ranks, an ss.Backend
    x = np.full(5, group.rank + 1.0)
    assert group.allreduce(x)[0] == group.size * (group.size + 1) / 2
```

`pytest` starts the ranks: fresh interpreters, once for each number of ranks, without MPI. Only backends that
are made of MPI (`samestep_backends`, `backends=`) have ranks of their own, started by the mpirun that belongs to
the MPI library mpi4py loads. All files share them, as they share the process of a plain pytest; tests without
the mark run first. `mpirun -n 2 pytest` runs the same files on the ranks it
has: tests for other numbers of ranks are deselected and counted, rank 0 prints, the exit codes agree.

**The mark**: `@pytest.mark.ranks(*sizes, dies=(), fresh=False, timeout=None, backends=None)`

- `sizes`: numbers of ranks; one test for each, on each backend that can have it.
- `timeout`: seconds for the whole test, instead of the ini option `samestep_ranks_timeout`.
- `dies`: ranks that the test kills, as in `dies={1}`; the others go on. Such a test gets a launch of its own.
- `fresh=True`: a launch of its own, for instance to initialise MPI before `samestep` does.
- `backends`: as in `backends=["mpi"]`, instead of the ini option `samestep_backends`.

**Fixtures**

- `group`: the world as an `ss.Backend`, on each backend in turn: `self` (one rank only), `native` (shared memory),
  `tcp`, `mpi`, `mpi-only` (MPI without shared memory), `nccl`. One rank is the same on all: it runs on `self` alone
  where the ini option names that. It is kept from
  test to test; a test that breaks a group on purpose breaks a `group.split(0)`.
- `ranks`: the number of ranks, for tests that initialise by themselves.

Other fixtures work as ever, in each rank; those of session scope live as long as the launch. `tmp_path` is a
different folder on each rank. With hypothesis, set `derandomize=True`, or each rank draws its own examples.

**When a test fails** on any rank it has failed. The rank that failed first speaks first, each line with its
rank in front; errors that only tell that a peer was lost come after the cause. Ranks that do not end the
test by themselves within 10 s after the first failure, or within the test's timeout, write where they are
and are killed, by SIGTERM and then SIGKILL; the next test gets fresh ranks. A rank that dies is a failure
with what it printed. All ranks begin a test together, and none begins the next before all have ended it.
To skip is a decision of all ranks: a test that some ranks skip has failed.

**The summary** says how many tests ran, on how many ranks, on which backends and where. Under

```toml
[tool.pytest.ini_options]
samestep_ranks_expected = ["2:40", "3:40"]        # tests that must have run on 2 and on 3 ranks
samestep_ranks_timeout = "60"
samestep_backends = ["self", "native"]
```

a run of everything fails if fewer tests ran than were promised, be it that they were skipped or never
collected. A run that was narrowed (`-k`, `-m`, a path) keeps no promises.

Not supported in the ranks: `--pdb`, `-s`, measuring coverage, and pytest-xdist.
"""

from typing import Any

__all__ = ["same_bits"]


def __getattr__(name: str) -> Any:
    if name == "same_bits":  # pytest loads this package in every run, and has no use for it
        from samestep.testing.compare_bits import same_bits

        return same_bits
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
