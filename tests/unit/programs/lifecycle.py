"""Programs of test_not_initialized.py: calls before `initialize`, and while the interpreter ends."""

import builtins
import json
import sys

import numpy as np
import samestep as ss


def use_fluxmpi_before_init():
    from samestep import fluxmpi as FluxMPI

    for call in (
        FluxMPI.total_workers,
        lambda: FluxMPI.allreduce(1.0),
        lambda: FluxMPI.Init(gpu_devices="x"),
    ):
        try:
            call()
        except ss.Error as error:
            print(error)


def use_before_initialize():
    assert ss.initialized() is False
    assert ss.initialized("mpi") is False
    for backend in (None, "mpi", ss.NativeBackend):
        try:
            ss.get_distributed_backend(backend)
        except ss.NotInitializedError as error:
            print(error)
    ss.finalize()


class CallsWhenDeleted:
    def __init__(self, verb, x):
        self.verb, self.x = verb, x

    def __del__(self):
        self.verb(self.x)


def call_while_the_interpreter_ends():
    backend = ss.initialize()
    verbs = (backend.allreduce, backend.iallreduce, backend.bcast)
    builtins.kept = [CallsWhenDeleted(verb, np.ones(3)) for verb in verbs]


if __name__ == "__main__":
    globals()[sys.argv[1]](*map(json.loads, sys.argv[2:]))
