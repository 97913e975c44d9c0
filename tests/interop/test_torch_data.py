"""Containers and samplers in torch's DataLoader."""

import types

import pytest
import samestep as ss

torch = pytest.importorskip("torch")
DataLoader = torch.utils.data.DataLoader
workers = pytest.mark.filterwarnings(
    "ignore:os.fork:RuntimeWarning"
)  # JAX's, where another test has imported it


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


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 50

    def __getitem__(self, index):
        return index


LOADERS = {
    "in this process": {"batch_size": 4},
    "two workers": {"batch_size": 4, "num_workers": 2},
    "three batches ahead, the rest dropped": {
        "batch_size": 5, "num_workers": 1, "prefetch_factor": 3, "drop_last": True,
    },
    "persistent": {"batch_size": 4, "num_workers": 1, "persistent_workers": True},
    "single items": {"batch_size": None, "num_workers": 1},
}  # fmt: skip


@workers
@pytest.mark.parametrize("n_batches", [1, 3, 5])
@pytest.mark.parametrize("options", LOADERS.values(), ids=LOADERS)
def test_a_loop_broken_off_goes_on_behind_the_last_batch_that_it_received(options, n_batches):
    """At another number of ranks. The sampler knows where that is only if the loader does not read ahead."""
    seen, states = [], []
    for backend in ranks(2):
        sampler = ss.DistributedSampler(backend, Numbers(), seed=1, mode="exact")
        batches = iter(DataLoader(Numbers(), sampler=sampler, **options))
        mine = [i for _ in range(n_batches) for i in torch.as_tensor(next(batches)).reshape(-1).tolist()]
        if options.get("num_workers"):
            with pytest.raises(ss.InvalidArgumentError, match=r"workers? .*consumed=.*StatefulDataLoader"):
                sampler.state_dict()
        else:
            assert sampler.state_dict() == sampler.state_dict(consumed=len(mine))
        states.append(sampler.state_dict(consumed=len(mine)))
        seen += mine
    assert states[0] == states[1]
    for backend in ranks(3):
        sampler = ss.DistributedSampler(backend, Numbers(), mode="exact")
        sampler.load_state_dict(states[0])
        seen += [i for batch in DataLoader(Numbers(), 4, sampler=sampler) for i in batch.tolist()]
    assert sorted(seen) == list(range(50))


@workers
def test_after_the_last_batch_of_workers_the_state_is_that_of_the_next_epoch():
    sampler = ss.DistributedSampler(ranks(1)[0], Numbers(), seed=1)
    loader = DataLoader(Numbers(), sampler=torch.utils.data.BatchSampler(sampler, 7, False), num_workers=1)
    assert len(list(loader)) == 8
    with pytest.raises(ss.InvalidArgumentError, match=r"set_epoch\(epoch \+ 1\)"):
        sampler.state_dict()
    sampler.set_epoch(1)
    assert sampler.state_dict() == {"n_items": 50, "seed": 1, "epoch": 1, "visited": 0, "shuffle": True}


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_stateful_loader_follows_the_sampler(workers, every):
    loaders = pytest.importorskip("torchdata.stateful_dataloader")

    def loader_and_sampler(backend):
        sampler = ss.DistributedSampler(backend, Numbers(), seed=1, mode="exact")
        sampler.set_epoch(2)
        options = {"num_workers": workers, "snapshot_every_n_steps": every}
        return loaders.StatefulDataLoader(Numbers(), 4, sampler=sampler, **options), sampler

    seen = []
    for backend in ranks(2):
        loader, _ = loader_and_sampler(backend)
        batches = iter(loader)
        seen += [i for _ in range(4) for i in next(batches).tolist()]
        resumed, sampler = loader_and_sampler(backend)
        resumed.load_state_dict(loader.state_dict())
        seen += [i for batch in resumed for i in batch.tolist()]
        sampler.set_epoch(3)
        assert [i for batch in resumed for i in batch.tolist()] == sampler.order()[backend.rank :: 2].tolist()
    assert sorted(seen) == list(range(50))


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
