"""Some of the runs of `mpi_faults.py`; that program makes as many as it is asked for."""

import mpi_faults
import pytest
from samestep.launch import mpirun


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 9))
def test_survivors_of_a_fault_over_mpi(tmp_path, seed):
    if mpirun.find()[1] not in mpi_faults.GO_ON:
        pytest.skip("the launcher ends all ranks with one")
    outcome = mpi_faults.run(seed, tmp_path)
    if outcome.fault == "os._exit(7)" and "ended by the launcher" in str(outcome.bad):
        pytest.skip("Open MPI ended the others, as it sometimes does in spite of --continuous")
    assert outcome.bad == [], outcome
