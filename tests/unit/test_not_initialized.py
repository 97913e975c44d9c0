"""Use before initialize, in a process that has never had a world, and while the interpreter ends."""

import subprocess
import sys
import textwrap


def run(code):
    return subprocess.check_output([sys.executable, "-c", textwrap.dedent(code)], text=True)


def test_before_initialize():
    text = run(
        """
        import samestep as ss
        assert ss.initialized() is False
        assert ss.initialized("mpi") is False
        for backend in (None, "mpi", ss.NativeBackend):
            try:
                ss.get_distributed_backend(backend)
            except ss.NotInitializedError as error:
                print(error)
        ss.finalize()
        """
    )
    lines = text.splitlines()
    assert len(lines) == 3
    assert all("initialize(" in line for line in lines)
    assert "MPIBackend" in lines[1]
    assert "NativeBackend" in lines[2]


def test_errors_are_also_the_builtins_a_user_would_catch():
    import builtins

    import samestep as ss

    pairs = {
        ss.InvalidArgumentError: ValueError,
        ss.MismatchError: ValueError,
        ss.NotInitializedError: RuntimeError,
        ss.UnavailableError: RuntimeError,
        ss.TimeoutError: builtins.TimeoutError,
        ss.PeerLostError: ConnectionError,
    }
    for ours, builtin in pairs.items():
        assert issubclass(ours, ss.Error)
        assert issubclass(ours, builtin)
        assert ours.__module__ == "samestep"


def test_while_the_interpreter_ends():
    code = """
        import builtins
        import numpy as np, samestep as ss

        class Last:
            def __init__(self, verb, x):
                self.verb, self.x = verb, x
            def __del__(self):
                self.verb(self.x)

        backend = ss.initialize()
        builtins.kept = [Last(verb, np.ones(3)) for verb in (backend.allreduce, backend.iallreduce, backend.bcast)]
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0
    assert done.stderr.count("RuntimeError: its program has ended") == 3
