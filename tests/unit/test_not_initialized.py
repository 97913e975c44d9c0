"""Use before initialize, in a process that has never had a world, and while the interpreter ends."""

import subprocess
import sys

from running import program


def run(function):
    """Runs a function of the programs; returns what it has printed."""
    command = [sys.executable, *program("unit/lifecycle", function)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return done


def test_before_initialize():
    text = run("use_before_initialize").stdout
    lines = text.splitlines()
    assert len(lines) == 3
    assert all("initialize(" in line for line in lines)
    assert "MPIBackend" in lines[1]
    assert "NativeBackend" in lines[2]


def test_fluxmpi_names_its_own_functions():
    lines = run("use_fluxmpi_before_init").stdout.splitlines()
    assert lines[:2] == ["there is no backend: call FluxMPI.Init() first"] * 2
    assert lines[2].startswith("FluxMPI.Init: devices must be ")


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
    done = run("call_while_the_interpreter_ends")
    assert done.stderr.count("RuntimeError: its program exited before making this call") == 3
