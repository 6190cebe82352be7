"""Texts for encoders that choose: those in which no choice is so close that rounding decides it.

A token that takes one head rather than another because of the last digit is no error of the runtime that
takes the other; and everything after it differs, in all tokens of its text. To leave such texts out of the
comparison would compare less, to allow the difference would compare nothing. So they are drawn again.

B batch, T tokens.
"""

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from attnlens_export.parity.grid import SEED, Case, Inputs, make_inputs
from attnlens_export.parity.reference import run_fp32
from attnlens_export.parity.result import TOLERANCE
from attnlens_model import Encoder, EncoderConfig
from attnlens_model.attention.mechanism import ChoosingModule

CLEAR_MARGIN = 2 * TOLERANCE
"""Numbers farther apart than this are in the same order where none is off by more than `TOLERANCE`."""
MAX_DRAWS = 20
"""After so many the last is taken. Where a router is all zeros every choice is a tie, in runtimes alike."""


def make_clear_inputs(case: Case, config: EncoderConfig, encoder: Encoder, seed: int = SEED) -> Inputs:
    """Draw the tensors of a case as `make_inputs` does, and again each text in which a choice is close.

    The same case, seed and weights give the same tensors; an encoder without choices gets those of
    `make_inputs`.
    """
    inputs = make_inputs(case, config, seed)
    if not any(isinstance(module, ChoosingModule) for module in encoder.modules()):
        return inputs
    for draw in range(1, MAX_DRAWS):
        is_close = smallest_margins(encoder, inputs) < CLEAR_MARGIN
        if not is_close.any():
            break
        inputs = _with_other_texts(inputs, make_inputs(case, config, seed + draw), is_close)
    return inputs


def smallest_margins(encoder: Encoder, inputs: Inputs) -> npt.NDArray[np.float64]:
    """Return how close the closest choice for a live token of each text is, (B,); infinity if it has none."""
    live = inputs.attention_mask == 1
    smallest = np.full(len(live), np.inf)

    def look(module: nn.Module, _args: object, output: object) -> None:
        assert isinstance(module, ChoosingModule)  # noqa: S101 - only these have the hook
        margins: Tensor = module.margins(output)
        np.minimum(smallest, np.where(live, margins.double().numpy(), np.inf).min(axis=1), out=smallest)

    choosing = [module for module in encoder.modules() if isinstance(module, ChoosingModule)]
    hooks = [module.register_forward_hook(look) for module in choosing]
    try:
        with torch.inference_mode():
            run_fp32(encoder, inputs, with_attentions=False)
    finally:
        for hook in hooks:
            hook.remove()
    return smallest


def _with_other_texts(inputs: Inputs, others: Inputs, is_replaced: npt.NDArray[np.bool_]) -> Inputs:
    """Return `inputs` with the ids and types of some texts; which tokens are live stays."""
    live = inputs.attention_mask == 1
    # Where the others have padding and these do not, the ids of these stay.
    taken = is_replaced[:, None] & live & (others.attention_mask == 1)
    types = inputs.token_type_ids
    if types is not None and others.token_type_ids is not None:
        types = np.where(taken, others.token_type_ids, types)
    return replace(
        inputs, input_ids=np.where(taken, others.input_ids, inputs.input_ids), token_type_ids=types
    )
