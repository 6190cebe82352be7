"""The largest of a few numbers, chosen by arithmetic.

Letters in shapes: E numbers to choose from.
"""

import torch
from torch import Tensor, nn


class LargestOf(nn.Module):
    """Marks the `count` largest of E numbers; of equal ones, those that come first.

    A number's rank is how many beat it: E x E comparisons, which are few where E is a number of heads.
    """

    earlier: Tensor

    def __init__(self, num_choices: int, count: int) -> None:
        super().__init__()
        self.count = count
        # 1 where number j comes before number i. The device is named so that the values exist even when the
        # rest is built without storage.
        earlier = torch.ones(num_choices, num_choices, device="cpu").tril(diagonal=-1)
        self.register_buffer("earlier", earlier, persistent=False)

    def forward(self, numbers: Tensor) -> Tensor:
        """(..., E) -> (..., E): 1 where a number is among the largest, else 0. It has no gradient."""
        numbers = numbers.detach()
        order = torch.sign(numbers[..., None, :] - numbers[..., :, None])  # (..., E, E): 1 where j is larger
        beats = (2.0 * order + self.earlier).clamp(0.0, 1.0)
        rank = beats.sum(dim=-1)  # (..., E), whole numbers
        return (self.count - rank).clamp(0.0, 1.0)
