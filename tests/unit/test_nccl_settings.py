"""Settings by which NCCL overrides what groups ask it for."""

import pytest
from samestep.gpu import group


@pytest.mark.parametrize(
    ("env", "where"),
    [
        ({}, "is in {file}"),
        ({"NCCL_COMM_BLOCKING": "0"}, "NCCL_COMM_BLOCKING=0 is set"),
        ({"NCCL_COMM_BLOCKING": ""}, ""),
    ],
)
def test_a_variable_goes_before_a_file(tmp_path, env, where):
    file = tmp_path / "nccl.conf"
    file.write_text("# of all jobs\n#NCCL_COMM_BLOCKING=0\nNCCL_COMM_BLOCKING=1\n")
    problem = group.problem_of_settings(env, group.settings_of_files({"NCCL_CONF_FILE": str(file)}))
    assert bool(problem) is bool(where)
    assert where.format(file=file) in problem
