"""The training loss as a module of its own, so that another can be put in its place.

B batch, T tokens, V vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class CrossEntropy(nn.Module):
    """Mean over all tokens of -log softmax(logits)[target], computed in fp32 or better."""

    def forward(self, logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
        """Return a scalar."""
        exact_BTV = logits_BTV.to(torch.promote_types(logits_BTV.dtype, torch.float32))
        return F.cross_entropy(exact_BTV.flatten(0, -2), targets_BT.flatten())
