import torch
from torch import nn


class DigitNet(nn.Module):
    """Maps grey images [rows, 1, 8, 8] from 0 to 1 to log-probabilities [rows, 10]."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Dropout(0.3),
            nn.Linear(512, 10),
        )

    def forward(self, images):
        return torch.log_softmax(self.layers(images), dim=1)
