"""The suite that defines a backend, on device memory that goes through the host."""

import fake_arrays
import pytest
from device_group import DeviceGroup
from test_in_place_rules import *  # noqa: F403
from test_movement import *  # noqa: F403
from test_point_to_point import *  # noqa: F403
from test_reductions import *  # noqa: F403

pytestmark = pytest.mark.ranks(2, backends=["staged"])


@pytest.fixture(scope="module")
def stream():
    return fake_arrays.Stream()


@pytest.fixture
def group(group, stream):
    return DeviceGroup(group, stream)
