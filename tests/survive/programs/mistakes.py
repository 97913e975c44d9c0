"""Programs as users write them by mistake, whose ranks are lost at times. See `train`."""

import contextlib
import json
import os
import signal
import sys
import time

import numpy as np
import samestep as ss
from samestep import _settings
from samestep.rendezvous import mesh

UID = os.environ.get("SAMESTEP_UID", "")


def die(uid):
    if uid == UID:
        os.kill(os.getpid(), signal.SIGKILL)


def result(*values):
    if ss.get_distributed_backend().rank == 0:
        print("result", json.dumps(values), flush=True)


def torch_under_other_names():
    import torch

    backend = ss.initialize(timeout=20.0)
    w = torch.full((3,), float(backend.rank), requires_grad=True)
    state = ss.TrainState(backend, params={"w": w})
    result(*(float(x) for x in backend.allreduce(w.detach())), state.params["w"] is w)


def subgroup():
    backend = ss.initialize(timeout=20.0)
    ss.TrainState(backend.group([0, 1]), w=np.zeros(2))


def after_the_loop():
    """The backend, and the process of each rank."""
    backend = ss.initialize(timeout=20.0)
    state = ss.TrainState(backend, w=np.zeros(2))
    for step in state.steps(steps=2):
        with step:
            backend.barrier()
    return backend, backend.allgather_object(os.getpid())


def raises_after_the_loop():
    backend, pids = after_the_loop()
    if backend.rank == 0:
        while any(os.path.exists(f"/proc/{pid}") for pid in pids[1:]):  # until the others have ended
            time.sleep(0.01)
        raise ValueError("cannot write the model")


def is_killed_after_the_loop(rank):
    """Others have ended, or are about to."""
    backend, pids = after_the_loop()
    if backend.rank == rank:
        while os.path.exists(f"/proc/{pids[1 - rank]}"):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    if backend.rank == 2:
        while os.path.exists(f"/proc/{pids[rank]}"):  # it ends last, and knows nothing
            time.sleep(0.01)


def goes_on_after_step_error():
    """Some ranks have assigned the parts when another raises."""
    backend = ss.initialize(timeout=20.0)
    state, raised = ss.TrainState(backend, w=np.zeros(2)), []
    for step in state.steps(steps=4):
        try:
            with step:
                backend.barrier()
                if backend.rank == 0 and len(raised) == 0:
                    raise ValueError("before the assignment")
                state.w = state.w + 1
                if backend.rank == 1 and len(raised) == 1:
                    raise ValueError("after the assignment")
        except ss.StepError:
            raised.append(state.w.tolist())
    result(*backend.allgather_object([raised, state.w.tolist()]))


def is_lost_before_it_begins(path=None):
    """The ranks are made with states of their own, and rank 0 dies before it has given them its one."""
    backend = ss.initialize(timeout=20.0)
    die("0.0")
    state = ss.TrainState(backend, w=np.full(2, 1.0 + int(UID[0])), save=path)
    for step in state.steps(steps=6):
        with step:
            backend.barrier()
            state.w = state.w + 1
    result(*backend.allgather_object([state.w.tolist(), state.step]))


def makes_groups_anew():
    """Collectively, whenever the ranks change; a rank that is started again takes part from its first step."""
    backend, groups = ss.initialize(timeout=20.0), []
    state = ss.TrainState(backend, w=0.0)
    state.on_change(lambda world: groups.append(world.split(0)))
    for step in state.steps(steps=60):
        with step:
            if state.step == 2:
                die("1.0")
            state.w = state.w + float(groups[-1].allreduce(1.0)) / groups[-1].size
            time.sleep(0.02 if backend.size == 3 else 0.2)
    result(state.w, backend.size, groups[-1].size)


class Dying:
    """A part whose rank dies as it gives the state to a newcomer."""

    def __init__(self):
        self.values = 0

    def state_dict(self):
        if self.values:
            die("1.0")
        return {"values": self.values}

    def load_state_dict(self, state):
        self.values = state["values"]


def loses_all_that_had_the_state(folder):
    """Rank 0 dies, is started again and taken in; then rank 1 dies before it has given it the state."""
    backend, back = ss.initialize(timeout=20.0), os.path.join(folder, "back")
    if UID == "0.1":
        open(back, "w").close()
    state = ss.TrainState(backend, w=1.0, part=Dying())
    for step in state.steps(steps=40):
        with step:
            if state.step == 2:
                die("0.0")
            while state.step == 5 and not os.path.exists(back):
                time.sleep(0.01)
            backend.barrier()
            state.w, state.part.values = state.w * 1.5, 1
            is_left_alone = UID == "1.0" and backend.size == 1
            time.sleep(0.5 if is_left_alone else 0.02)  # steps enough for rank 0 to come back
    result(state.w, state.step)


def loses_the_writer(path):
    """Rank 0 dies as it writes the file between two steps; it is asked for after each."""

    def opened(event, args):
        if event == "open" and str(args[0]).startswith(os.path.dirname(path) + "/.") and state.step == 3:
            die("0.0")

    backend = ss.initialize(timeout=20.0)
    state = ss.TrainState(backend, w=np.zeros(2))
    sys.addaudithook(opened)
    for step in state.steps(steps=6):
        with step:
            state.w = state.w + backend.allreduce(1.0, "max")
        state.save(path)
    result(state.w.tolist(), state.step, backend.size)


def is_lost_between_steps(call, how, path):
    """Rank 0 or 1 dies in `save` or `restore`; "passed": as rank 1 is in the next step, and rank 2 is not."""
    backend, made = ss.initialize(timeout=20.0), []
    pids, bcast = backend.allgather_object(os.getpid()), type(backend)._bcast_facts

    def passed_by_rank_1(group, *args):
        found = bcast(group, *args)
        if made == [call] and how == "passed":
            made.append("once")
            die("0.0")
            if UID == "2.0":
                while os.path.exists(f"/proc/{pids[0]}"):
                    time.sleep(0.01)
                raise ss.PeerLostError("as if nothing had come")
        return found

    def opened(event, args):
        if event == "open" and made and os.path.basename(path) in str(args[0]) and how == "file":
            die("0.0")

    type(backend)._bcast_facts = passed_by_rank_1
    sys.addaudithook(opened)
    state = ss.TrainState(backend, w=np.zeros(2))
    for step in state.steps(steps=6):
        with step:
            state.w = state.w + backend.allreduce(1.0, "max")
        if state.step == 4 and not made:
            made.append(call)
            if how == "before":
                die("1.0")
            getattr(state, call)(path)
    result(*backend.allgather_object([state.w.tolist(), state.step]))


def comes_back(path, call):
    """Rank 1 is started again, in a program with collective calls before its loop and behind each step."""
    backend, back = ss.initialize(timeout=20.0), f"{path}.back"
    if UID == "1.1":
        open(back, "w").close()
    state = ss.TrainState(backend, w=np.zeros(2))
    if call == "restore":
        state.restore(path)
    sizes = []
    for step in state.steps(steps=40):
        with step:
            if state.step == 12:
                die("1.0")
            while backend.rank == 0 and state.step == 15 and not os.path.exists(back):
                time.sleep(0.01)
            time.sleep(0.02)
            state.w = state.w + backend.allreduce(1.0, "max")
        if call == "save":
            state.save(path)
        elif call == "allreduce":
            with contextlib.suppress(ss.PeerLostError):
                backend.allreduce(1.0)
        sizes.append(backend.size)
    result(state.w.tolist(), state.step, sorted(set(sizes)))


def tell_pid(folder):
    """For `await_its_end`, before a rank that was started again can end."""
    with open(os.path.join(folder, "begun"), "w") as file:
        file.write(str(os.getpid()))
    os.rename(os.path.join(folder, "begun"), os.path.join(folder, "pid"))


def await_its_end(folder):
    died = os.path.join(folder, "died")
    while not os.path.exists(died):
        with contextlib.suppress(FileNotFoundError), open(os.path.join(folder, "pid")) as file:
            if not os.path.exists(f"/proc/{file.read()}"):
                open(died, "w").close()
        time.sleep(0.01)


def waits_in_vain(folder):
    """Rank 1 is started again, while the others are in a step that is longer than it may wait."""
    backend = ss.initialize(timeout=1.0 if UID == "1.1" else 20.0)
    if UID == "1.1":
        tell_pid(folder)
    state = ss.TrainState(backend, w=np.zeros(2))
    for step in state.steps(steps=4):
        with step:
            if state.step == 2:
                die("1.0")
                await_its_end(folder)
            backend.barrier()
            state.w = state.w + 1
    result(*backend.allgather_object(state.w.tolist()))


def has_another_version(uid, folder):
    if uid == (UID or f"{os.environ['RANK']}.0"):
        _settings.VERSION = "9.9"
    if UID == "1.1":
        tell_pid(folder)
    backend = ss.initialize(timeout=20.0)
    state = ss.TrainState(backend, w=np.zeros(2))
    for step in state.steps(steps=4):
        with step:
            if state.step == 2:
                die("1.0")
                await_its_end(folder)
            state.w = state.w + backend.allreduce(1.0, "max")
    result(*backend.allgather_object(state.w.tolist()))


def cannot_be_connected(folder):
    """Rank 1 is started again where no port is free, so that the ranks cannot be connected while it is one of them."""
    backend, back = ss.initialize(timeout=20.0), os.path.join(folder, "back")
    if UID == "1.1":
        mesh._listen = lambda *_: (None, "no port is free")
        open(back, "w").close()
    state = ss.TrainState(backend, w=np.zeros(2))
    known = {backend.size}
    for step in state.steps(steps=200):
        with step:
            if state.step == 2:
                die("1.0")
            while state.step == 5 and not os.path.exists(back):
                time.sleep(0.01)
            known.add(backend.size)
            backend.barrier()
            state.w = state.w + 1
            time.sleep(0.01)
    result(state.w.tolist(), sorted(known))


def has_two_states():
    backend = ss.initialize(timeout=20.0)
    ss.TrainState(backend, w=np.zeros(2))
    ss.TrainState(backend, w=np.zeros(2))


def changes(how):
    """The parts, before a collective in which rank 0 is lost."""
    backend = ss.initialize(timeout=20.0)
    state = ss.TrainState(backend, w=np.zeros(2))
    for step in state.steps(steps=4):
        with step:
            if how == "assigns":
                state.w = state.w + 1
            elif how == "in place":
                state.w += 1
            elif how == "by gradients":
                state.w[...] += backend.allreduce_gradients(np.ones(2))
            if state.step == 2:
                die("0.0")
            backend.barrier()
    result(state.w.tolist())


if __name__ == "__main__":
    globals()[sys.argv[1]](*map(json.loads, sys.argv[2:]))
