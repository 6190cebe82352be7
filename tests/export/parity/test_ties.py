"""Texts in which a choice is close are drawn again, and nothing else is."""

import numpy as np
import pytest
import torch

from attnlens_export.parity import reference
from attnlens_export.parity.grid import Case, Padding, make_inputs
from attnlens_export.parity.reference import make_clear_inputs, smallest_margins
from attnlens_model import Encoder, new_encoder
from configs import small_config

MIXTURE = {"kind": "mixture", "num_heads": 6, "shared_heads": 2, "active_heads": 2}
CASE = Case(8, 33, Padding.MIDDLE)


@pytest.fixture
def encoder() -> Encoder:
    attention = [MIXTURE, MIXTURE | {"router": "norm"}, {"kind": "softmax", "num_heads": 4}]
    return new_encoder(small_config({"num_layers": 3, "attention": attention}), seed=0)


def test_texts_in_which_a_choice_is_close_are_drawn_again(
    encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = make_inputs(CASE, encoder.config)
    margins = smallest_margins(encoder, inputs)
    limit = float(np.sort(margins)[3])  # three of eight texts are closer
    monkeypatch.setattr(reference, "CLEAR_MARGIN", limit)
    clear = make_clear_inputs(CASE, encoder.config, encoder)
    np.testing.assert_array_equal(clear.attention_mask, inputs.attention_mask)
    changed = (clear.input_ids != inputs.input_ids).any(axis=1)
    np.testing.assert_array_equal(changed, margins < limit)
    assert (smallest_margins(encoder, clear) >= limit).all()
    again = make_clear_inputs(CASE, encoder.config, encoder)
    np.testing.assert_array_equal(clear.input_ids, again.input_ids)
    padding = clear.attention_mask == 0
    assert (clear.input_ids[padding] == encoder.config.embeddings.pad_token_id).all()


def test_margins_cover_live_tokens_in_all_layers(encoder: Encoder) -> None:
    case = Case(3, 7, Padding.EMPTY_ROW)
    inputs = make_inputs(case, encoder.config)
    margins = smallest_margins(encoder, inputs)
    assert np.isinf(margins[1])
    assert (margins[[0, 2]] < 1).all()
    # Values at padding are ignored.
    inputs.input_ids[inputs.attention_mask == 0] = 7
    np.testing.assert_allclose(smallest_margins(encoder, inputs), margins, rtol=1e-3)


def test_encoder_that_does_not_choose_gets_the_texts_of_the_grid() -> None:
    config = small_config()
    inputs, expected = make_clear_inputs(CASE, config, new_encoder(config, 0)), make_inputs(CASE, config)
    np.testing.assert_array_equal(inputs.input_ids, expected.input_ids)


def test_last_draw_is_used_if_every_choice_is_a_tie(encoder: Encoder) -> None:
    with torch.no_grad():
        encoder.get_parameter("layers.0.attention.router.routed.weight").zero_()
    inputs = make_clear_inputs(CASE, encoder.config, encoder)
    assert (smallest_margins(encoder, inputs) == 0).all()
