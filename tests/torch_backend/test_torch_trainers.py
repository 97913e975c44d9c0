"""Libraries that train through torch.distributed: their scripts run over this backend unchanged. Optional."""

import pytest

torch = pytest.importorskip("torch")

import torch_models as models  # noqa: E402

pytestmark = [
    pytest.mark.ranks(2, timeout=120, backends=["native"]),
    pytest.mark.filterwarnings("ignore"),  # of other libraries
]


def test_accelerate(over, monkeypatch):
    accelerate = pytest.importorskip("accelerate", reason="pip install accelerate")
    with over("samestep") as dist:
        for name, value in {"RANK": dist.get_rank(), "LOCAL_RANK": dist.get_rank(), "WORLD_SIZE": 2}.items():
            monkeypatch.setenv(name, str(value))
        accelerator = accelerate.Accelerator(cpu=True)
        net = models.seeded(models.Sometimes)
        net, opt = accelerator.prepare(net, torch.optim.SGD(net.parameters(), 0.05))
        x, y = models.batch(dist.get_rank(), dist.get_world_size())
        for _ in range(3):
            opt.zero_grad()
            accelerator.backward(models.loss_of(net, x, y))
            opt.step()
        whole = models.seeded(models.Sometimes)
        opt = torch.optim.SGD(whole.parameters(), 0.05)
        for _ in range(3):
            opt.zero_grad()
            models.loss_of(whole, *models.batch(0, 1)).backward()
            opt.step()
        for p, q in zip(net.parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-12)


def test_lightning(over, monkeypatch, tmp_path):
    lightning = pytest.importorskip("lightning", reason="pip install lightning")
    from lightning.pytorch.plugins.environments import LightningEnvironment
    from lightning.pytorch.strategies import DDPStrategy

    class Net(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = models.seeded(models.Sometimes)

        def training_step(self, batch, _):
            return models.loss_of(self.net, *batch)

        def configure_optimizers(self):
            return torch.optim.SGD(self.net.parameters(), 0.05)

    with over("samestep") as dist:
        monkeypatch.setenv("LOCAL_RANK", str(dist.get_rank()))  # "started by somebody else"
        environment = LightningEnvironment()
        environment.set_world_size(2)
        environment.set_global_rank(dist.get_rank())
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=2,
            strategy=DDPStrategy(process_group_backend="samestep", cluster_environment=environment),
            max_epochs=2,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=str(tmp_path),
        )
        data = torch.utils.data.TensorDataset(*models.batch(0, 1))
        net = Net()
        trainer.fit(net, torch.utils.data.DataLoader(data, batch_size=3))
        everyones = [None, None]
        dist.all_gather_object(everyones, [p.detach().numpy().tobytes() for p in net.parameters()])
        assert everyones[0] == everyones[1]
        assert trainer.global_step == 2 * 2
