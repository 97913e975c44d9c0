"""The suite that defines a backend, on device memory: through NCCL, and through the host."""

import fake_arrays
import pytest
from device_group import DeviceGroup
from test_groups import *
from test_in_place_rules import *
from test_movement import *
from test_point_to_point import *
from test_reductions import *
from test_work import *

pytestmark = pytest.mark.ranks(1, 2, 3, backends=["fakes", "staged"])


@pytest.fixture(scope="module")
def stream():
    return fake_arrays.Stream()


@pytest.fixture
def group(group, stream):
    return DeviceGroup(group, stream)
