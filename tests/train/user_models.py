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


class Foreign(Plain):
    """The same with a layer whose operator tells nobody its sizes, as C extensions may not."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.hidden = nn.Sequential(nn.Linear(width, width), Extension())


class Extension(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = torch.ops.rayzero_tests.twice(x)
        return result


class Outside(Plain):
    """The same with a layer that leaves torch."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.hidden = nn.Sequential(nn.Linear(width, width), Leave())


class Leave(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.from_numpy(x.detach().numpy())


LIBRARY = torch.library.Library("rayzero_tests", "DEF")  # type: ignore[no-untyped-call]
LIBRARY.define("twice(Tensor x) -> Tensor")  # type: ignore[no-untyped-call]
LIBRARY.impl("twice", lambda x: 2 * x, "CPU")  # type: ignore[no-untyped-call]
