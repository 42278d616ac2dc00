"""Train a small network on scikit-learn's digits with other peers: `python plain_loop.py [ADDRESS]`.

The first peer needs no address, and prints its own: start the script again with it, here or on another machine.
"""

import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from cotrain import join_run


def build_model():
    layers = nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU()
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * 8 * 8, 10))


digits = load_digits()
images, labels = torch.tensor(digits.images / 16, dtype=torch.float32).unsqueeze(1), torch.tensor(digits.target)
is_test = torch.arange(len(labels)) % 5 == 0
# Each peer trains with AdamW on its own, and all average whenever they have used 8192 samples together.
settings = {"local_updates": True, "target_batch_size": 8192, "optimizer": "adamw", "learning_rate": 1e-3}

with join_run(
    build_model, batch_size=32, run_id="digits", initial_peers=sys.argv[1:], **settings, warmup_steps=0
) as run:
    for x, y in run.batches(TensorDataset(images[~is_test], labels[~is_test])):  # until Ctrl-C
        run.step(cross_entropy(run.model(x), y))

correct = run.model.cpu()(images[is_test]).argmax(dim=1) == labels[is_test]
print(f"Accuracy on {len(correct)} other digits: {correct.float().mean():.1%}")
