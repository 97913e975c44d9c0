"""Programs of test_survive_hosts.py: ranks on several hosts that go on after a loss."""

import hashlib
import json
import os
import sys
import time
from pathlib import Path

import numpy as np
import samestep as ss
from samestep.rendezvous.membership import PLACE
from samestep.rendezvous.store import PrefixStore
from samestep.rendezvous.tcp_store import TCPStore
from samestep.world.member import Member

N_ITEMS = 200
UID = os.environ.get("SAMESTEP_UID", "0.0")


def train(folder, n_steps=60, pause=0.005):
    """Each rank notes its steps and its error in a file of its own, for nothing that it prints passes a cut line."""
    x = np.random.RandomState(3).standard_normal(N_ITEMS)
    with (Path(folder) / UID).open("w", buffering=1) as log:
        log.write(json.dumps({"pid": os.getpid()}) + "\n")
        try:
            backend = ss.initialize(timeout=20.0)
            sampler = ss.DistributedSampler(backend, N_ITEMS, batch_size=24, shards=8, seed=1)
            total = ss.Accumulator(backend, shards=8)
            state = ss.TrainState(backend, mean=np.zeros(3), sampler=sampler)
            for step in state.steps(steps=n_steps):
                with step:
                    for shard in step:
                        grads = np.full(3, x[shard.items].sum()) - state.mean
                        total.add(grads, shard=shard.index, weight=len(shard))
                        time.sleep(pause)
                    state.mean = state.mean + 0.1 * total.mean()
                log.write(json.dumps({"at": time.time(), "step": state.step, "size": backend.size}) + "\n")
        except ss.Error as error:
            log.write(json.dumps({"at": time.time(), "error": str(error)}) + "\n")
            raise
    if backend.rank == 0:
        print("result", hashlib.sha256(state.mean.tobytes()).hexdigest(), backend.size, flush=True)


def listeners():
    """The addresses at which somebody of this network listens, but for those of the loopback interface."""
    backend = ss.initialize(timeout=20.0)
    found = set()
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            local, state = line.split()[1], line.split()[3]
            if state == "0A":
                found.add(local.rpartition(":")[0])
    if backend.rank == 0:
        print("listeners", *sorted(found - {"0100007F"}), flush=True)
    ss.finalize()


def keep_store():
    store = TCPStore("", 0, is_master=True)
    PrefixStore(PLACE, store).set("trains", ss.__version__)  # what newcomers ask first
    print(json.dumps({"port": store.port}), flush=True)
    sys.stdin.read()


def wait_for_members(address, uid, act):
    member = Member(address, uid)
    member.are_called()
    print(json.dumps({"ready": True}), flush=True)
    try:
        if act == "meet":
            member.meet(60.0)
        else:
            sys.stdin.readline()
            member._looked_at = 0.0
            member.are_called()
    except ss.UnavailableError as error:
        print(json.dumps({"error": str(error), "at": time.time()}), flush=True)


if __name__ == "__main__":
    globals()[sys.argv[1]](*map(json.loads, sys.argv[2:]))
