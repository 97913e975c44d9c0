"""Metrics of torchmetrics whose lists differ in length on the ranks give what one process gives for all data."""

import torch
import torch.distributed as dist
import torchmetrics as tm

CLASSES = 5


def data(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rank 0 has 37 items, rank 1 has 64 and so on."""
    made = torch.Generator().manual_seed(rank)
    n = 37 + 27 * rank
    return torch.randn(n, CLASSES, generator=made).softmax(1), torch.randint(CLASSES, (n,), generator=made)


def metrics() -> dict[str, tuple[tm.Metric, str]]:
    """What each takes: "classes" (scores and labels), or "values" (two vectors)."""
    task = {"task": "multiclass", "num_classes": CLASSES}
    return {
        "Accuracy": (tm.Accuracy(**task), "classes"),
        "AUROC": (tm.AUROC(**task), "classes"),
        "AveragePrecision": (tm.AveragePrecision(**task), "classes"),
        "ConfusionMatrix": (tm.ConfusionMatrix(**task), "classes"),
        "F1Score": (tm.F1Score(**task, average="macro"), "classes"),
        "CalibrationError": (tm.CalibrationError(**task), "classes"),
        "MeanSquaredError": (tm.MeanSquaredError(), "values"),
        "R2Score": (tm.R2Score(), "values"),
        "SpearmanCorrCoef": (tm.SpearmanCorrCoef(), "values"),
        "CatMetric": (tm.CatMetric(), "one"),
    }


def update(metric: tm.Metric, kind: str, scores: torch.Tensor, labels: torch.Tensor) -> None:
    if kind == "classes":
        metric.update(scores, labels)
    elif kind == "values":
        metric.update(scores[:, 0], labels.float())
    else:
        metric.update(scores[:, 0])


def main() -> None:
    dist.init_process_group("gloo")
    everything = [data(rank) for rank in range(dist.get_world_size())]
    for name, (metric, kind) in metrics().items():
        update(metric, kind, *everything[dist.get_rank()])
        (alone, _) = metrics()[name]
        alone.distributed_available_fn = lambda: False
        for part in everything:
            update(alone, kind, *part)
        torch.testing.assert_close(
            metric.compute(), alone.compute(), msg=lambda text, name=name: f"{name}: {text}"
        )
    print(len(metrics()), "metrics agree with one process")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
