"""The network and the data of the demonstration. Stock torch and scikit-learn only."""

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

__all__ = ["CLASSES", "TRAINING_SAMPLES", "Digits", "Net", "augment", "held_out"]

CLASSES = 10
TRAINING_SAMPLES = 1536  # the first 1,536 of 1,797; the rest, by other hands, measures accuracy


def _images() -> tuple[Tensor, Tensor]:
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).div_(16).unsqueeze_(1)  # [1797, 1, 8, 8] in 0 .. 1
    return images, torch.tensor(digits.target, dtype=torch.int64)


class Digits:
    """The training samples: (image [1, 8, 8] float32, label, the sample's own number)."""

    def __init__(self) -> None:
        images, labels = _images()
        self._images, self._labels = images[:TRAINING_SAMPLES], labels[:TRAINING_SAMPLES]

    def __len__(self) -> int:
        return TRAINING_SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        return self._images[index], self._labels[index], index


def held_out() -> tuple[Tensor, Tensor]:
    """The 261 images [261, 1, 8, 8] and labels [261] that no training step sees."""
    images, labels = _images()
    return images[TRAINING_SAMPLES:], labels[TRAINING_SAMPLES:]


def augment(sample: tuple[Tensor, Tensor, int], generator: torch.Generator) -> tuple[Tensor, Tensor, int]:
    """Moves the digit by up to one pixel, changes its contrast and adds noise, from the sample's own generator."""
    image, label, index = sample
    down, right = torch.randint(-1, 2, (2,), generator=generator).tolist()
    image = torch.roll(image, (down, right), dims=(1, 2))
    image = image * (0.8 + 0.4 * torch.rand((), generator=generator))
    return image + 0.05 * torch.randn(image.shape, generator=generator), label, index


class Net(nn.Module):
    """Two convolutions with BatchNorm, a wide layer and dropout: 1.1 million parameters, 13 MB with AdamW's state."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.BatchNorm2d(64),
            nn.ReLU(),
        )
        self.head = nn.Sequential(
            nn.Flatten(), nn.Linear(64 * 4 * 4, 1024), nn.ReLU(), nn.Dropout(0.4), nn.Linear(1024, CLASSES)
        )

    def forward(self, images: Tensor) -> Tensor:
        out: Tensor = self.head(self.features(images))
        return out
