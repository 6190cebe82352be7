"""Draws the pictures of mechanisms.md from the outputs of layers: `make docs`. A test compares them.

    python docs/draw_mechanisms.py [DIR]

DIR defaults to docs/pictures. The encoders are small, have random weights from a seed, and run in PyTorch on
one text of 48 random tokens. In untrained encoders, distance terms and composition have little effect, so
some projections are multiplied by a factor, which the page states.

Shapes: T tokens, D hidden size, H heads, G global tokens, w window.
"""

import io
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.patches import Patch
from PIL import Image
from torch import nn

from attnlens.patterns import Band, BlockTable
from attnlens_model import EncoderConfig, new_encoder
from attnlens_model.attention.overlapping import OverlappingSelfAttention, layer_overlaps

PICTURES = Path(__file__).parent / "pictures"
NUM_TOKENS, WIDTH, VOCABULARY, SEED = 48, 64, 1000, 0
DISTANCES_TIMES, COMPOSITION_TIMES = 50.0, 60.0
PERCENTILE = 98.0  # the color scale ends at this percentile of the weights
# White means no weight; red and blue are signs.
SEQUENTIAL, SIGNED = "viridis", "RdBu_r"
OWN, NEIGHBOR, PLAIN_LINE = "#1f6f8b", "#e09f3e", "#8a9299"
INCHES_WIDE, DOTS_PER_INCH = 8.0, 150

Array = npt.NDArray[np.float32]
Pattern = Band | BlockTable | None


class Drawn(NamedTuple):
    """Outputs of one layer for the text."""

    layer: nn.Module
    """Attention module of the layer."""
    outputs: Mapping[str, Array]
    """Outputs by role: (H, T, ...) or (T, H)."""
    pattern: Pattern
    """Sparsity pattern of the weights, if any."""

    @property
    def weights(self) -> Array:
        """Weights after the softmax, (H, T, T)."""
        rows = self.outputs["attention_weights"]
        if isinstance(self.pattern, Band):
            return self.pattern.dense(rows)
        return rows if self.pattern is None else self.pattern.at(NUM_TOKENS).dense(rows)


def run(kind: str, *, times: Mapping[str, float] | None = None, **options: Any) -> Drawn:  # noqa: ANN401 - JSON
    """Run an encoder of one layer with this attention on the text.

    Args:
        kind: Kind of attention.
        times: Factors of projection weights, by the last part of the projection's name.
        options: Other keys of the attention configuration.
    """
    config = EncoderConfig.from_dict(
        {
            "family": "attnlens",
            "hidden_size": WIDTH,
            "num_layers": 1,
            "embeddings": {"vocab_size": VOCABULARY},
            "positions": {"max_position_embeddings": NUM_TOKENS},
            "attention": {"kind": kind, **options},
            "feed_forward": {"intermediate_size": 2 * WIDTH},
        }
    )
    encoder = new_encoder(config, seed=SEED)
    layer = encoder.layers[0].get_submodule("attention")
    with torch.no_grad():
        for name, module in layer.named_modules():
            if isinstance(module, nn.Linear):
                module.weight *= (times or {}).get(name.rpartition(".")[-1], 1.0)
        ids = torch.from_numpy(np.random.default_rng(SEED).integers(0, VOCABULARY, (1, NUM_TOKENS)))
        result = encoder(ids, torch.ones_like(ids), output_attentions=True)
    outputs = {role: tensor[0].numpy() for role, tensor in result.layers[0].items()}
    [weights, *_] = config.layer_attentions[0].outputs()
    return Drawn(layer, outputs, weights.pattern)


def softmax(figure: Figure) -> None:
    """Draw softmax attention, a window and ALiBi with the same weights."""
    panels: dict[str, dict[str, Any]] = {
        "plain": {},
        "window of 8": {"window": 8},
        "ALiBi": {"alibi": True},
    }
    axes = figure.subplots(1, len(panels), sharey=True)
    heads = [run("softmax", num_heads=4, **options).weights[0] for options in panels.values()]
    draw_maps(figure, axes, dict(zip(panels, heads, strict=True)))


def disentangled(figure: Figure) -> None:
    """Draw softmax attention and disentangled attention."""
    options = {"num_heads": 4, "terms": "c2p|p2c", "distance_buckets": 16, "max_relative_positions": 48}
    times = dict.fromkeys(("distance_key", "distance_query"), DISTANCES_TIMES)
    heads = run("softmax", num_heads=4).weights[0], run("disentangled", times=times, **options).weights[0]
    titles = ("softmax: content alone", "disentangled: content and distance")
    draw_maps(figure, figure.subplots(1, 2, sharey=True), dict(zip(titles, heads, strict=True)))


def longformer(figure: Figure) -> None:
    """Draw the rows of a band, and the equivalent dense weights."""
    drawn = run("longformer", num_heads=4, window=6, num_global_tokens=2)
    assert isinstance(drawn.pattern, Band)
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=[drawn.pattern.width, NUM_TOKENS])
    rows, number, window = drawn.outputs["attention_weights"][0], 2, 6
    image = draw_map(left, rows, largest=largest_shown(rows))
    draw_map(right, drawn.weights[0], largest=largest_shown(rows))
    left.set(title="band, as returned", ylabel="token", xlabel="columns")
    right.set(title="the same as (T, T)", xlabel="attended to (key)", ylabel="attends (query)")
    ends = np.array([0, number, number + 2 * window + 1, drawn.pattern.width])
    for end in ends[1:-1]:
        left.axvline(end - 0.5, color="black", linewidth=0.8)
    left.set_xticks((ends[:-1] + ends[1:] - 1) / 2, ["G", "2w + 1", "G"])
    left.tick_params(axis="x", length=0)
    draw_scale(figure, image, [left, right], "attention weight")


def big_bird(figure: Figure) -> None:
    """Draw two heads, which have different random blocks."""
    size = 4
    drawn = run("big_bird", num_heads=4, block_size=size, num_random_blocks=1, table_tokens=NUM_TOKENS)
    axes = figure.subplots(1, 2, sharey=True)
    draw_maps(figure, axes, {f"head {head}": drawn.weights[head] for head in (0, 1)})
    for each in axes:
        edges = np.arange(0, NUM_TOKENS + 1, size) - 0.5
        each.set_xticks(edges, minor=True)
        each.set_yticks(edges, minor=True)
        each.grid(which="minor", color="lightgray", linewidth=0.5)
        each.tick_params(which="minor", length=0)


def overlapping(figure: Figure) -> None:
    """Draw the components that each head uses, for the overlaps of four layers."""
    num_heads, overlaps = 4, layer_overlaps("depth", 4)
    width = WIDTH // num_heads
    axes = figure.subplots(len(overlaps), 1, sharex=True)
    for layer, (each, overlap) in enumerate(zip(axes, overlaps, strict=True)):
        module = run("overlapping", num_heads=num_heads, overlap=overlap).layer
        assert isinstance(module, OverlappingSelfAttention)
        numbers = torch.arange(1, WIDTH + 1, dtype=torch.float32)[None, None]  # 0 means no component
        seen = module.overlapping_heads(numbers)[0, :, 0].int().numpy()  # (H, K + 2 o)
        cells = np.zeros((num_heads, WIDTH), dtype=np.int64)
        for head, components in enumerate(seen):
            found = components[components > 0] - 1
            cells[head, found] = np.where(found // width == head, 1, 2)
        each.imshow(cells, cmap=ListedColormap(["white", OWN, NEIGHBOR]), vmin=0, vmax=2, aspect="auto")
        each.set_xticks(np.arange(WIDTH + 1) - 0.5, minor=True)
        each.set_yticks(np.arange(num_heads + 1) - 0.5, minor=True)
        each.grid(which="minor", color="lightgray", linewidth=0.4)
        each.tick_params(which="minor", length=0)
        each.set_yticks(range(num_heads))
        each.set(ylabel="head", title=f"layer {layer}: overlap {overlap}")
    axes[-1].set_xlabel("component of queries, keys and values")
    patches = [Patch(color=OWN, label="the head's own"), Patch(color=NEIGHBOR, label="of a neighbor")]
    figure.legend(handles=patches, loc="outside lower center", ncols=2, frameon=False)


def mixture(figure: Figure) -> None:
    """Draw the gates of all tokens, and the share of tokens that selected each head."""
    num_heads, num_shared = 8, 2
    drawn = run("mixture", num_heads=num_heads, shared_heads=num_shared, active_heads=2)
    gates = drawn.outputs["head_gates"]  # (T, H)
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=[4.2, 1])
    image = draw_map(left, gates.T, largest=largest_shown(gates), aspect="auto")
    left.set(title="gates", xlabel="token", ylabel="head")
    left.set_yticks(range(num_heads), [f"{n} shared" if n < num_shared else str(n) for n in range(num_heads)])
    left.axhline(num_shared - 0.5, color="black", linewidth=0.8)
    loads = 100 * (gates > 0).mean(axis=0)  # (H,)
    right.barh(range(num_heads), loads, color=[PLAIN_LINE] * num_shared + [OWN] * (num_heads - num_shared))
    for head, load in enumerate(loads):
        right.text(load + 2, head, f"{load:.0f} %", va="center", fontsize=8)
    right.set(title="load", xlabel="tokens, %", xlim=(0, 135), xticks=[0, 50, 100])
    right.spines[["top", "right"]].set_visible(False)
    draw_scale(figure, image, [left, right], "gate")


def composed(figure: Figure) -> None:
    """Draw one head after the softmax and after composition, and the row sums."""
    times = {"factors": COMPOSITION_TIMES, "diagonal": COMPOSITION_TIMES}
    drawn = run("composed", num_heads=4, times=times)
    panels = {"after softmax": drawn.weights[0], "composed": drawn.outputs["attention_composed"][0]}
    *maps, sums = figure.subplots(1, 3, sharey=True, width_ratios=[1, 1, 0.45])
    largest = max(map(largest_shown, panels.values()))
    for axes, (title, weights) in zip(maps, panels.items(), strict=True):
        image = draw_map(axes, weights, largest=largest, is_signed=True)
        axes.set(title=title, xlabel="attended to (key)")
    maps[0].set_ylabel("attends (query)")
    draw_scale(figure, image, maps, "weight", is_signed=True)
    for (title, weights), color in zip(panels.items(), (PLAIN_LINE, NEIGHBOR), strict=True):
        sums.plot(weights.sum(axis=-1), range(NUM_TOKENS), color=color, label=title)
    sums.axvline(0, color="lightgray", linewidth=0.8, zorder=0)
    sums.set(title="sum of a row", xlabel="sum")
    sums.set_box_aspect(2.2)
    sums.spines[["top", "right"]].set_visible(False)
    figure.legend(*sums.get_legend_handles_labels(), loc="outside lower right", ncols=2, frameon=False)


def draw_maps(figure: Figure, axes: npt.NDArray[Any], panels: Mapping[str, Array]) -> None:
    """Draw weights (T, T) side by side, with the same color scale."""
    largest = max(map(largest_shown, panels.values()))
    for each, (title, weights) in zip(axes, panels.items(), strict=True):
        image = draw_map(each, weights, largest=largest)
        each.set(title=title, xlabel="attended to (key)")
    axes[0].set_ylabel("attends (query)")
    draw_scale(figure, image, list(axes), "attention weight")


def draw_map(
    axes: Axes,
    weights: Array,
    *,
    largest: float,
    is_signed: bool = False,
    aspect: Literal["equal", "auto"] = "equal",
) -> AxesImage:
    """Draw a matrix. Zeros are white."""
    shown = np.ma.masked_array(weights, mask=weights == 0)
    lowest, colors = (-largest, SIGNED) if is_signed else (0.0, SEQUENTIAL)
    return axes.imshow(shown, cmap=colors, vmin=lowest, vmax=largest, interpolation="nearest", aspect=aspect)


def largest_shown(weights: Array) -> float:
    """Return the largest value of the color scale."""
    return float(np.percentile(np.abs(weights[weights != 0]), PERCENTILE))


def draw_scale(
    figure: Figure, image: AxesImage, axes: Sequence[Axes], label: str, *, is_signed: bool = False
) -> None:
    """Draw the color bar, with an arrow for larger values."""
    tips = "both" if is_signed else "max"
    figure.colorbar(image, ax=axes, label=label, shrink=0.85, extend=tips)


def write_png(figure: Figure, path: Path) -> None:
    """Write a file with 256 colors, which is small."""
    with io.BytesIO() as file:
        figure.savefig(file, format="png", dpi=DOTS_PER_INCH)
        pixels = Image.open(file).convert("RGB")
    pixels.quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)


# Function and height in inches of each picture, by file name.
DRAWINGS: dict[str, tuple[Callable[[Figure], None], float]] = {
    "softmax": (softmax, 3.0),
    "disentangled": (disentangled, 3.8),
    "longformer": (longformer, 4.4),
    "big_bird": (big_bird, 3.9),
    "overlapping": (overlapping, 4.8),
    "mixture": (mixture, 3.0),
    "composed": (composed, 3.7),
}


def main() -> None:
    """Draw all pictures."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else PICTURES
    folder.mkdir(exist_ok=True)
    for name, (draw, height) in DRAWINGS.items():
        figure = Figure(figsize=(INCHES_WIDE, height), layout="constrained", facecolor="white")
        draw(figure)
        write_png(figure, folder / f"{name}.png")


if __name__ == "__main__":
    main()
