"""FSDP2 on CPU, saved and loaded by torch.distributed.checkpoint: training goes on with the same parameters."""

import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def build(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(*(torch.nn.Linear(7, 7) for _ in range(3)))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), 0.01)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for step in range(3):
        model(torch.full((2, 7), 1.0 + step + dist.get_rank())).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def main() -> None:
    dist.init_process_group("gloo")
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    model, optimizer = build(0)
    train(model, optimizer)
    parameters, state = get_state_dict(model, optimizer)
    dcp.save({"model": parameters, "optimizer": state}, checkpoint_id=folder[0])
    train(model, optimizer)
    again, its_optimizer = build(1)
    parameters, state = get_state_dict(again, its_optimizer)
    dcp.load({"model": parameters, "optimizer": state}, checkpoint_id=folder[0])
    set_state_dict(again, its_optimizer, model_state_dict=parameters, optim_state_dict=state)
    train(again, its_optimizer)
    for expected, found in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(expected.full_tensor(), found.full_tensor())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
