"""`import torch` registers a name; all else waits until a program asks for it."""

import json
import subprocess
import sys

import pytest
from running import script
from torch_versions import finds_backends

pytest.importorskip("torch")

pytestmark = [pytest.mark.slow, finds_backends]

LAUNCHERS = ("SAMESTEP_", "OMPI_", "PMI", "SLURM_")


def after_import(environment, *words, autoload="1"):
    env = {name: value for name, value in environment.items() if not name.startswith(LAUNCHERS)}
    ended = subprocess.run(
        [sys.executable, script("torch_backend/import_torch"), *words],
        env=env | {"TORCH_DEVICE_BACKEND_AUTOLOAD": autoload},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


def test_import_torch_registers_a_name_and_changes_nothing_else(environment):
    without, found = after_import(environment, autoload="0"), after_import(environment)
    assert (without.pop("known"), found.pop("known")) == (False, True)
    modules = {name for name in set(found.pop("modules")) - set(without.pop("modules")) if "samestep" in name}
    assert modules == {"_samestep_torch"}
    assert found == without


def test_a_program_that_asks_for_the_name_gets_the_handlers(environment):
    plain, asked = after_import(environment), after_import(environment, "ask")
    assert set(asked["handlers"]) - set(plain["handlers"]) == {"mpi"}
    assert asked["handlers"]["env"] == "_samestep_torch"
    assert asked["finders"] == plain["finders"]
