"""Optimizers of the init/update kind, over dicts of arrays."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np


class Pair(NamedTuple):
    """An optimizer as in optax."""

    init: Callable
    update: Callable


def each(function, *trees):
    return {name: function(*(tree[name] for tree in trees)) for name in trees[0]}


def sgd():
    return Pair(lambda params: (), lambda grads, state, params=None: (each(lambda g: -0.1 * g, grads), state))


def momentum():
    def update(grads, state, params=None):
        state = each(lambda v, g: 0.9 * v + g, state, grads)
        return each(lambda v: -0.1 * v, state), state

    return Pair(lambda params: each(np.zeros_like, params), update)


def adamw():
    def init(params):
        return {"count": 0, "mu": each(np.zeros_like, params), "nu": each(np.zeros_like, params)}

    def update(grads, state, params):
        t = state["count"] + 1
        mu = each(lambda m, g: 0.9 * m + 0.1 * g, state["mu"], grads)
        nu = each(lambda n, g: 0.999 * n + 0.001 * g * g, state["nu"], grads)
        updates = each(
            lambda m, n, p: -0.01 * (m / (1 - 0.9**t) / (np.sqrt(n / (1 - 0.999**t)) + 1e-8) + 0.1 * p),
            *(mu, nu, params),
        )
        return updates, {"count": t, "mu": mu, "nu": nu}

    return Pair(init, update)
