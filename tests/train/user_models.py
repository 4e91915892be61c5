"""Models a user might bring to a dry run."""

import torch
from torch import Tensor, nn


class Plain(nn.Module):
    """A classifier over tokens, 1e9 parameters wide if asked."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(256, width)
        self.hidden = nn.Linear(width, width)
        self.register_buffer("scale", torch.ones(3))

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return self.hidden(self.table(inputs)).square().mean()


class Peeking(Plain):
    """The same with a layer that looks at a value."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.hidden = nn.Sequential(nn.Linear(width, width), Peek())


class Peek(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum().item() > 0 else -x
