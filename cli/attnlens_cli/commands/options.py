"""Options that several commands have.

Names of poolings and layouts are stated here a second time, because importing the packages that define them
takes seconds. Tests compare them with those packages.
"""

import click

POOLINGS = ("mean", "cls", "max", "last_token", "weighted_mean", "mean_sqrt_length")
LAYOUT_NAMES = ("triton", "ovms")

parity_tokens_option = click.option(
    "--parity-tokens",
    type=click.IntRange(min=1),
    help="Longest input to compare.  [default: what 1 GiB of attention maps allows]",
)

link_option = click.option(
    "--link/--copy",
    default=False,
    help="Hard links to the bundle's files, to save space, or copies.  [default: copies, because "
    "Python's onnx refuses weights with several hard links]",
)
