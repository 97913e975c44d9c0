"""Evaluate each item once, whatever their number: count on each rank, divide once at the end.

samestep run -n 3 examples/recipes/evaluate.py
"""

import numpy as np
import samestep as ss

N_ITEMS = 101  # no multiple of anything
labels = np.arange(N_ITEMS) % 7
predicted = np.where(np.arange(N_ITEMS) % 10 == 0, -1, labels)  # every tenth is wrong

with ss.initialize() as backend:
    mine = ss.DistributedDataContainer(backend, np.arange(N_ITEMS))  # lengths differ by at most one
    hits = n_items = 0
    for items in np.array_split(np.array(mine), 4):  # no collective in this loop: ranks may differ in batches
        hits += int((predicted[items] == labels[items]).sum())
        n_items += len(items)
    accuracy = ss.metric_mean(backend, {"accuracy": (hits, n_items)})["accuracy"]

    # For metrics that need all items at once, such as an area under a curve or a confusion matrix.
    everyone = ss.gather_metrics(backend, {"predicted": predicted[np.array(mine)]})["predicted"]
    assert np.array_equal(everyone, predicted)
    assert accuracy == np.mean(predicted == labels)
    if backend.rank == 0:
        print(f"accuracy {accuracy:.4f} over {len(everyone)} items")
