"""Containers and samplers in torch's DataLoader."""

import types

import pytest
import samestep as ss

torch = pytest.importorskip("torch")
DataLoader = torch.utils.data.DataLoader


def ranks(size):
    return [types.SimpleNamespace(rank=rank, size=size) for rank in range(size)]


def columns():
    return {"x": torch.arange(10.0).reshape(10, 1), "y": torch.arange(10)}


def test_a_container_is_a_data_set():
    parts = [ss.DistributedDataContainer(rank, columns()) for rank in ranks(3)]
    seen = [y for part in parts for batch in DataLoader(part, batch_size=2) for y in batch["y"].tolist()]
    assert seen == list(range(10))


def test_a_container_of_a_data_set():
    dataset = torch.utils.data.TensorDataset(*columns().values())
    assert ss.DistributedDataContainer(ranks(2)[1], dataset)[0][1] == 5


def test_a_sampler_serves_a_loader():
    samplers = [ss.DistributedSampler(rank, 10, mode="exact") for rank in ranks(2)]
    loaders = [DataLoader(torch.arange(10), sampler=sampler, batch_size=3) for sampler in samplers]
    assert sorted(i for loader in loaders for batch in loader for i in batch.tolist()) == list(range(10))


def test_both_with_a_worker_process():
    """The worker is spawned, so that data and container are pickled."""
    part = ss.DistributedDataContainer(ranks(2)[1], columns())
    sampler = ss.DistributedSampler(ranks(1)[0], part)
    loader = DataLoader(part, 2, sampler=sampler, num_workers=1, multiprocessing_context="spawn")
    assert sorted(i for batch in loader for i in batch["y"].tolist()) == [5, 6, 7, 8, 9]


def test_tensors_index_a_container_and_a_tuple_of_columns_is_taken_apart():
    x, y = columns().values()
    part = ss.DistributedDataContainer(ranks(2)[1], (x, y))
    inputs, outputs = part[:]
    assert torch.equal(inputs[:, 0], outputs.float())
    assert outputs.data_ptr() == y[5:].data_ptr()
    for index in (torch.tensor([3]), torch.tensor([0, -1]), outputs > 6, torch.tensor(2), slice(1, 3)):
        assert torch.equal(part[index][1], outputs[index])
    for index in (torch.tensor([0.5]), torch.tensor(True), torch.tensor([[1]])):
        with pytest.raises(TypeError, match="boolean mask"):
            part[index]


def test_a_subset_and_a_tensor_data_set_give_items():
    subset = torch.utils.data.Subset(torch.utils.data.TensorDataset(*columns().values()), range(9, -1, -1))
    part = ss.DistributedDataContainer(ranks(2)[1], subset)
    assert [y.item() for _, y in part] == [y.item() for _, y in part[:]] == [4, 3, 2, 1, 0]
    assert [y.item() for _, y in part[[0, -1]]] == [4, 0]
