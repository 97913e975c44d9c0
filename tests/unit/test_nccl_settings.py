"""Settings by which NCCL overrides what groups ask it for."""

import pytest
from samestep.gpu import nccl_settings


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
    problem = nccl_settings.problem(env, nccl_settings.of_files({"NCCL_CONF_FILE": str(file)}))
    assert bool(problem) is bool(where)
    assert where.format(file=file) in problem


ORDER, INTERFACE, OURS = "NCCL_LAUNCH_ORDER_IMPLICIT", "NCCL_SOCKET_IFNAME", "SAMESTEP_SOCKET_IFNAME"


@pytest.mark.parametrize(
    ("env", "in_file", "set_to"),
    [
        ({}, "", {ORDER: "1"}),
        ({ORDER: "0"}, "", {}),
        ({}, ORDER, {}),
        ({OURS: "eth1, eth2"}, "", {ORDER: "1", INTERFACE: "=eth1,eth2"}),
        ({OURS: "eth1", INTERFACE: "ib"}, "", {ORDER: "1"}),
        ({OURS: "eth1", INTERFACE: ""}, "", {ORDER: "1", INTERFACE: "=eth1"}),
        ({OURS: "eth1"}, INTERFACE, {ORDER: "1"}),
    ],
)
def test_what_the_user_has_not_set(env, in_file, set_to):
    assert nccl_settings.defaults(env, {in_file: ("x", "file")}) == set_to
