"""Faithfulness: how well explanation methods rank the tokens of a text, measured for each model."""
