"""What threads of one process share in the package itself: caches, and objects that one changes and another reads."""

import json
import subprocess
import sys
import sysconfig
import time

import numpy as np
import pytest
import samestep as ss
from at_once import run_at_once
from samestep import _core

N_THREADS = 4
ROUNDS = 300
BUSY_S = 0.5  # in which all threads run, also beside other processes
FREE_THREADED = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))


@pytest.mark.skipif(not FREE_THREADED, reason="this Python has the GIL")
def test_the_import_leaves_the_gil_off():
    code = "import json, sys, samestep, samestep.distributed; print(json.dumps(sys._is_gil_enabled()))"
    shown = subprocess.check_output([sys.executable, "-W", "error", "-c", code], text=True)
    assert json.loads(shown) is False


def test_many_classes_of_arrays():
    """More than the facts about types that are kept: each thread drives out those of the others."""

    def view(number):
        kinds = [type(f"Array{number}_{i}", (np.ndarray,), {}) for i in range(6)]
        kinds += [type(f"Masked{number}_{i}", (np.ma.MaskedArray,), {}) for i in range(6)]
        arrays = [np.arange(5.0).view(kind) for kind in kinds]
        for i in range(20 * ROUNDS):
            x = arrays[i % len(arrays)]
            if isinstance(x, np.ma.MaskedArray):
                with pytest.raises(ValueError, match="masked"):
                    _core.view_info(x)
            else:
                assert _core.view_info(x)[:2] == ("float64", (5,))
            assert _core.view_info(np.float32(3.0))[:2] == ("float32", ())

    run_at_once([lambda number=number: view(number) for number in range(N_THREADS)])


def test_registered_dtypes():
    ml_dtypes = pytest.importorskip("ml_dtypes")

    def view():
        for _ in range(ROUNDS):
            assert _core.view_info(np.zeros(2, ml_dtypes.bfloat16))[0] == "bfloat16"
            assert _core.view_info(np.zeros(2, ml_dtypes.float8_e5m2))[0] == "float8_e5m2"
            with pytest.raises(ValueError, match="int4"):
                _core.view_info(np.zeros(2, ml_dtypes.int4))

    run_at_once([view] * N_THREADS)


def test_a_tree_that_another_thread_changes():
    """Whichever leaves the tree has at the time, they are arrays, and live as long as the view of the tree."""
    tree = {"list": [np.zeros(3) for _ in range(5)], **{f"k{i}": np.zeros(4) for i in range(50)}}

    def change():
        for i in range(ROUNDS):
            tree[f"k{i % 50}"] = np.zeros(i % 7)
            tree.pop(f"k{(i + 25) % 50}", None)
            tree["list"].append(np.zeros(2))
            del tree["list"][0]

    def read():
        for _ in range(ROUNDS):
            found = _core.fast_tree(tree)
            assert all(type(leaf) is np.ndarray for leaf in found.leaves)
            copy = found.copy()
            assert all(type(leaf) is np.ndarray for leaf in copy["list"])

    run_at_once([change, read, change, read])


def test_a_communicator_that_another_thread_replaces():
    """As after a block of together() that has ended by an exception."""
    backend = ss.NativeBackend(_core.make_self_communicator("one"), timeout=20.0, world_hosts=["here"])
    end = time.monotonic() + BUSY_S

    def replace():
        while time.monotonic() < end:
            backend._set_comm(_core.make_self_communicator("one"))

    def call():
        x = np.ones(1)
        while time.monotonic() < end:
            for _ in range(100):
                assert backend.allreduce(x) is x
                assert backend._comm.name == "one"

    run_at_once([replace, call, call, replace])


def test_one_world_for_all_threads():
    made = run_at_once([ss.initialize] * N_THREADS)
    assert all(one is made[0] for one in made)
    run_at_once([ss.finalize] * N_THREADS)
    assert made[0].closed
    assert not ss.initialized()


def test_schemes_are_given_once():
    from samestep.rendezvous import HashStore
    from samestep.rendezvous import url as urls

    def give(number):
        taken = 0
        for i in range(50):
            try:
                urls.register_rendezvous_handler(f"threads{i}", lambda url: iter(()))
            except ValueError:
                taken += 1
            with urls.url_of_store(HashStore(), number, 9) as url:
                assert urls.open_store(url, None, None)[1:] == (number, 9)
        return taken

    try:
        assert sum(run_at_once([lambda n=n: give(n) for n in range(N_THREADS)])) == 50 * (N_THREADS - 1)
    finally:
        for i in range(50):
            urls._handlers.pop(f"threads{i}", None)
