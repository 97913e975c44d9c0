"""One rank ends with an exception: the others end soon, with an error that names it."""

import re

import jobs
import pytest

SOON = 60.0  # seconds for a whole job, start included, on a very busy machine; half of every deadline inside


def test_peers_in_a_collective(tmp_path):
    ended = jobs.run(
        3,
        """
        import numpy as np, samestep as ss
        world = ss.initialize("mpi", timeout=120)
        world.allreduce(np.ones(3))
        if world.rank == 1:
            raise KeyError("no such batch")
        try:
            world.allreduce(np.ones(3))
        except ss.PeerLostError as error:
            print(f"<{world.rank} {error}>", flush=True)
            raise SystemExit(3)
        """,
        tmp_path,
    )
    assert ended.code != 0
    assert ended.seconds < SOON
    assert "KeyError: 'no such batch'" in ended.text
    told = re.findall(r"<(\d) ([^>]*)>", ended.text)
    for rank, text in told:
        assert rank in "02"
        assert "rank 1" in text, text
        assert "KeyError" in text, text
    assert told, ended.text


def test_peers_that_communicate_only_later(tmp_path):
    ended = jobs.run(
        2,
        """
        import time, numpy as np, samestep as ss
        world = ss.initialize("mpi", timeout=120)
        world.barrier()
        if world.rank == 1:
            raise ValueError("bad value")
        end = time.monotonic() + 1.0
        while time.monotonic() < end:  # at work
            pass
        world.recv(np.empty(1), 1)
        """,
        tmp_path,
    )
    assert ended.code != 0
    assert ended.seconds < SOON
    assert "ValueError: bad value" in ended.text


def test_in_a_group_that_others_wait_in(tmp_path):
    ended = jobs.run(
        3,
        """
        import numpy as np, samestep as ss
        world = ss.initialize("mpi", timeout=120)
        pair = world.split(world.rank // 2)
        if world.rank == 1:
            raise ValueError("bad value")
        pair.allreduce(np.ones(100_000))
        world.barrier()
        """,
        tmp_path,
    )
    assert ended.code != 0
    assert ended.seconds < SOON


@pytest.mark.parametrize("call", ["sys.exit(7)", "raise KeyboardInterrupt", "os._exit(7)"])
def test_other_ways_to_leave(tmp_path, call):
    ended = jobs.run(
        2,
        f"""
        import os, sys, samestep as ss
        world = ss.initialize("mpi", timeout=120)
        world.barrier()
        if world.rank == 1:
            {call}
        world.barrier()
        """,
        tmp_path,
    )
    assert ended.code != 0
    assert ended.seconds < SOON


@pytest.mark.parametrize("mpi_by", ["us", "the application"])
@pytest.mark.parametrize("finalize", [True, False])
def test_a_clean_end(tmp_path, mpi_by, finalize):
    ended = jobs.run(
        3,
        f"""
        {"from mpi4py import MPI" if mpi_by == "the application" else ""}
        import numpy as np, samestep as ss
        world = ss.initialize()
        part = world.split(world.rank % 2)
        world.allreduce(np.ones(3))
        part.iallreduce(np.ones(3)).wait()
        {"ss.finalize()" if finalize else ""}
        print("end", flush=True)
        """,
        tmp_path,
        SAMESTEP_WARN_AFTER="5",
    )
    assert ended.code == 0, ended.text
    assert "".join(ended.text.split()) == "end" * 3  # a launcher may join lines of several ranks
    assert ended.seconds < SOON


def test_one_process_that_fails_says_only_that(tmp_path):
    ended = jobs.run(0, "import samestep as ss; ss.initialize(); raise ValueError('bad value')", tmp_path)
    assert ended.code == 1
    assert ended.text.rstrip().endswith("ValueError: bad value")
    assert "samestep" not in ended.text.replace("import samestep as ss", "")
