"""The interface between a run and what it trains: model, samples, loss and metrics."""

from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset, default_collate

# A mean over the samples of a batch, or a mean and the number of values in it, such as the predicted tokens
Metric = float | torch.Tensor | tuple[float | torch.Tensor, int]


class Task:
    """What a run trains. The file of --task defines one subclass; docs/own-model.md shows how.

    All peers of a run have the same file: trainers, monitor and evaluator build one from it, without arguments.
    """

    schema = ""  # trainers whose tasks have another one do not average

    def build_model(self) -> torch.nn.Module:
        """Build the model with its initial weights, on the CPU.

        torch's generator has the seed of the run, so the weights are equal on all peers.
        """
        raise NotImplementedError("build_model is missing")

    def load_samples(self, split: str) -> Dataset:
        """Load the samples of a split, as a map-style dataset.

        :param split: "train", or "validation" at the evaluator
        """
        raise NotImplementedError("load_samples is missing")

    def collate(self, samples: list) -> Any:
        """Make a batch of samples: tensors in any nesting of dictionaries, lists and tuples."""
        return default_collate(samples)

    def compute_loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        """Return the mean loss over the samples of a batch, which is on the device of the model."""
        return model(**batch).loss

    def weigh(self, batch: Any) -> float | torch.Tensor:
        """Return the weight of a micro-batch in a local step, above 0: how many values its loss is the mean of.

        Without it all micro-batches of a local step weigh the same, as they have equally many samples.
        """
        return 1.0

    def evaluate(self, model: torch.nn.Module, batch: Any) -> dict[str, Metric]:
        """Return the metrics of a batch of validation samples by name."""
        return {"loss": self.compute_loss(model, batch)}

    def eval_batch_size(self) -> int:
        """Return the samples of a batch of the evaluator, if it was told none."""
        return 16

    def summarize(self, means: dict[str, float]) -> dict[str, float]:
        """Return what the evaluator reports, from the means of the metrics over all validation samples."""
        return means

    def save_pretrained(self, model: torch.nn.Module, folder: Path) -> None:
        """Write files for users of the model into a checkpoint, which has its weights as model.safetensors anyway."""
        if hasattr(model, "save_pretrained"):
            model.save_pretrained(folder)
