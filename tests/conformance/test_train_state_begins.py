"""All ranks begin with the state of rank 0, or none does."""

import numpy as np
import pytest
import samestep as ss

pytestmark = pytest.mark.ranks(1, 2, 3)


class Part:
    """What one rank cannot load."""

    def __init__(self, value, works):
        self.value, self.works = value, works

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        if not self.works:
            raise KeyError("lr")
        self.value = state["value"]


@pytest.mark.parametrize("bad", [1, 2])
def test_one_rank_cannot_take_the_state(group, bad):
    part = Part(10 + group.rank, works=group.rank != bad)
    if bad >= group.size:
        ss.TrainState(group, part=part)
        assert part.value == 10
    else:
        with pytest.raises(
            ss.UnavailableError, match=f"of rank 0 cannot be taken on rank {bad}: KeyError: 'lr'"
        ):
            ss.TrainState(group, part=part)
    assert group.allreduce(1) == group.size


def test_numbers_and_arrays(group):
    state = ss.TrainState(group, w=np.full(3, float(group.rank)), lr=0.1 * (1 + group.rank))
    assert (state.w.tolist(), state.lr, state.step) == ([0.0] * 3, 0.1, 0)
