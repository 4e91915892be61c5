"""The training loss as a module of its own, so that another can be put in its place.

B batch, T tokens, V vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class CrossEntropy(nn.CrossEntropyLoss):
    """Mean over all tokens of -log softmax(logits)[target], computed in fp32 or better.

    A target of -100 counts nowhere. In training, label_smoothing of each target's probability is
    spread over the vocabulary (Szegedy et al., arXiv:1512.00567, section 7).
    """

    def __init__(self, label_smoothing: float = 0.0) -> None:
        super().__init__(label_smoothing=label_smoothing)

    def forward(self, logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
        """Return a scalar."""
        exact_BTV = logits_BTV.to(torch.promote_types(logits_BTV.dtype, torch.float32))
        return F.cross_entropy(
            exact_BTV.flatten(0, -2),
            targets_BT.flatten(),
            label_smoothing=self.label_smoothing if self.training else 0.0,
        )
