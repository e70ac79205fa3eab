"""A convolutional network of your own, with its data and its loss, trained by hpctrain.

The job file own_model.yaml names the three functions below. They are plain PyTorch: nothing
in them knows of ranks, and the same file runs on one rank or on a thousand.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset


def build(channels: int = 16, classes: int = 4) -> nn.Module:
    """model: {module: own_model:build} - called with model.args."""
    return nn.Sequential(
        nn.Conv2d(1, channels, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(channels, 2 * channels, 3, padding=1),
        nn.ReLU(),
        nn.Dropout(0.1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(2 * channels, classes),
    )


class Gratings(Dataset[tuple[Tensor, int]]):
    """Noisy stripes in one of several directions; the class is the direction."""

    def __init__(self, images: int, size: int, classes: int, noise: float) -> None:
        self.images, self.size, self.classes, self.noise = images, size, classes, noise

    def __len__(self) -> int:
        return self.images

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        # A sample depends on its index alone, so every rank and every restart sees the same.
        random = torch.Generator().manual_seed(index)
        label = index % self.classes
        angle = torch.tensor(torch.pi * label / self.classes)
        y, x = torch.meshgrid(torch.arange(self.size), torch.arange(self.size), indexing="ij")
        phase = 6.28 * torch.rand((), generator=random)
        stripes = torch.sin((x * torch.cos(angle) + y * torch.sin(angle)) * 1.2 + phase)
        noise = self.noise * torch.randn(self.size, self.size, generator=random)
        return (stripes + noise)[None], label


def data(images: int = 4096, size: int = 16, classes: int = 4, noise: float = 0.5) -> Gratings:
    """data: {module: own_model:data} - anything with __len__ and __getitem__."""
    return Gratings(images, size, classes, noise)


def loss(model: nn.Module, batch: tuple[Tensor, Tensor], smoothing: float = 0.0) -> Tensor:
    """train.loss: {module: own_model:loss} - the mean loss over a micro-batch."""
    images, labels = batch
    return F.cross_entropy(model(images), labels, label_smoothing=smoothing)
