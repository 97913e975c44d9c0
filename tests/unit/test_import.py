"""What `import samestep` does not do."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = {
    "torch",
    "jax",
    "cupy",
    "mpi4py",
    "optax",
    "ml_dtypes",
    "pytest",
    "multiprocessing",
    "asyncio",
    "socket",
}


def modules_after(code):
    program = f"import sys\n{code}\nprint(*sys.modules)"
    return set(subprocess.check_output([sys.executable, "-c", program], text=True).split())


def test_importing_samestep_imports_no_framework():
    found = modules_after("import samestep") - modules_after("import numpy")
    assert not found & HEAVY


def test_a_world_of_one_needs_no_mpi():
    found = modules_after("import samestep as ss\nbackend = ss.initialize('native')\nbackend.allreduce(1)")
    assert "mpi4py.MPI" not in found  # whose import starts MPI
    assert "torch" not in found


def test_every_public_name_exists():
    import samestep as ss

    assert sorted(set(ss.__all__)) == sorted(ss.__all__)
    for name in ss.__all__:
        assert hasattr(ss, name), name


def test_type_checkers_are_told_the_same_names():
    import samestep as ss

    stub = ast.parse(Path(ss.__file__).with_suffix(".pyi").read_text())
    names = next(ast.literal_eval(node.value) for node in stub.body if isinstance(node, ast.Assign))
    assert sorted(names) == sorted(ss.__all__)


def test_the_import_of_a_package_does_not_replace_a_name():
    code = "import samestep, samestep.launch.run, samestep.torch\nassert callable(samestep.launch)"
    assert "samestep.world.lifecycle" not in modules_after(code)


def test_the_launcher_needs_neither_numpy_nor_the_core():
    for module in ("launch.run", "launch.agent", "torch.autoload", "_util.jax_variables"):
        found = modules_after(f"import samestep.{module}")
        assert not found & {"numpy", "samestep._core", "importlib.metadata"}, module
        assert "samestep.rendezvous" not in found, module  # but where ranks that are lost are started again


def test_listings_hold_public_names_only():
    import samestep as ss
    from samestep import fluxmpi

    public = {
        *ss.__all__,
        "__version__",
        "data",
        "distributed",
        "errors",
        "fluxmpi",
        "multiprocessing",
        "optimizer",
    }
    assert set(ss.__all__) <= set(dir(ss)) <= public | {"testing", "torch"}
    assert set(dir(fluxmpi)) == set(fluxmpi.__all__)


@pytest.mark.parametrize("name", ["Backend", "MPIBackend", "NativeBackend", "NCCLBackend"])
def test_a_class_that_is_called_says_what_to_write(name):
    import samestep as ss

    argument = "" if name == "Backend" else f"samestep.{name}"
    with pytest.raises(TypeError, match=rf"^{name} is not called: .*samestep\.initialize\({argument}\)"):
        ss.initialize(getattr(ss, name)())
