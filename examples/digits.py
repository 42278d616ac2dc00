"""Example of a task: a small network that reads handwritten digits, scikit-learn's 1,797 images of 8 x 8 pixels.

See docs/own-model.md for the commands of monitor, trainers and evaluator.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from cotrain import Task


class Digits(Task):
    """Classification of images as one of ten digits."""

    def build_model(self) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1),
            nn.GroupNorm(4, 32),  # not BatchNorm: its statistics would be another on each peer
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(32 * 4 * 4, 10),
        )

    def load_samples(self, split: str) -> TensorDataset:
        images, labels = load_digits(return_X_y=True)
        images = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16
        part = slice(1437) if split == "train" else slice(1437, None)
        return TensorDataset(images[part], torch.tensor(labels[part]))

    def compute_loss(self, model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        images, labels = batch
        return cross_entropy(model(images), labels)

    def evaluate(self, model: nn.Module, batch: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        images, labels = batch
        logits = model(images)
        accuracy = (logits.argmax(dim=-1) == labels).float().mean()
        return {"loss": cross_entropy(logits, labels), "accuracy": accuracy}
