"""Ranks that have met over the network without a secret take numbers from each other, and no objects."""

import json
import os
import subprocess
import sys

import pytest
from ranks import FreePort
from running import script

PROGRAM = script("rendezvous/trust")


def run(host, **env):
    """What each of two ranks printed as JSON, and what it wrote to standard error."""
    with FreePort() as port:
        url = f"tcp://{host}:{port}"
        ranks = [
            subprocess.Popen(
                [sys.executable, PROGRAM, url, str(rank)],
                env={**os.environ, **{name: value[rank] for name, value in env.items() if value[rank]}},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        said = [rank.communicate(timeout=100) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said
    return [json.loads(out.splitlines()[-1]) for out, _ in said], [error for _, error in said]


OPEN, LOOPBACK = "0.0.0.0", "127.0.0.1"
TCP = {"SAMESTEP_NATIVE_TRANSPORT": ["tcp", "tcp"]}


@pytest.mark.parametrize("trusting", ["nobody", "rank 1"])
def test_objects_are_refused_on_all_ranks_and_all_else_works(trusting):
    found, warned = run(OPEN, **TCP, SAMESTEP_TRUST_NETWORK=["", "1" if trusting == "rank 1" else ""])
    assert "met over the network without a secret" in warned[0]
    assert "export SAMESTEP_SECRET=" in warned[0]
    assert warned[0].count("without a secret") == 1
    assert "without a secret" not in warned[1]
    for rank, printed in enumerate(found):
        assert printed["transport"] == "tcp"
        assert len(printed["refused"]) == 3 * 6 * 2 + 1
        assert all("which can run code" in text and "SAMESTEP_SECRET" in text for text in printed["refused"])
        assert printed["refused"][0].startswith("bcast_object: ")
        assert printed["same"] == ["0.1", "np.float16(1.0)", "True", "1j"]
        assert "leaf ['b'] is missing on rank 0 and a number on rank 1" in printed["differs"]
        assert printed["w"] == [1.0, 1.0]
        assert printed["rows"] == [[0.0, 0.0], [1.0, 2.0, 1.0, 2.0]][rank]
        assert printed["joined"] == [1.0] * 3
        assert printed["part"] == [[0.0, 1.0], [2.0, 3.0]][rank]


@pytest.mark.parametrize(
    ("host", "env"),
    [
        (OPEN, {**TCP, "SAMESTEP_SECRET": ["s", "s"]}),
        (OPEN, {**TCP, "SAMESTEP_TRUST_NETWORK": ["1", "1"]}),
        (LOOPBACK, TCP),
        (OPEN, {}),  # one host: the kernel vouches for the user of each process
    ],
    ids=["secret", "trusted network", "loopback", "one host"],
)
def test_objects_are_taken_where_the_ranks_have_proved_themselves(host, env):
    found, warned = run(host, **env)
    for printed in found:
        assert printed["refused"] == []
        assert printed["same"] == ["0.1", "np.float16(1.0)", "True", "1j"]
    assert "secret" not in "".join(warned)
