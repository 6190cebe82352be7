"""How the graph in int8 of a bundle is shown."""

from collections import Counter
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from attnlens.v1.manifest_pb2 import Manifest
    from attnlens.v1.quantization_pb2 import Quantization
    from attnlens_export.parity.result import ParityResult


def show_quantization(manifest: "Manifest", parity: "ParityResult") -> None:
    """Print what was measured of the graph in int8, and what the manifest says of its products and speed."""
    from rich.box import SIMPLE  # noqa: PLC0415 - heavy
    from rich.console import Console  # noqa: PLC0415 - heavy
    from rich.table import Table  # noqa: PLC0415 - heavy

    if parity.int8 is None:
        return
    found, gate = parity.int8.agreement, parity.int8.gate
    table = Table(
        box=SIMPLE,
        pad_edge=False,
        padding=(0, 0, 0, 1),
    )
    table.add_column("cosine", no_wrap=True)
    for heading in ("texts", "mean", "smallest"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, kind in found.kinds.items():
        table.add_row(name, str(kind.num_texts), f"{kind.mean_cosine:.6f}", f"{kind.min_cosine:.6f}")
    table.add_row("  gate, for each", "", f"{gate.min_mean_cosine:g}", f"{gate.min_cosine:g}")
    num_texts = str(parity.int8.num_texts)
    table.add_row("all embeddings", num_texts, f"{found.mean_cosine:.6f}", f"{found.min_cosine:.6f}")
    table.add_row("all token vectors", "", f"{found.mean_token_cosine:.6f}", f"{found.min_token_cosine:.6f}")
    click.echo(
        f"model_int8.onnx against model.onnx, {parity.int8.num_texts} texts it was not calibrated with"
    )
    Console().print(table)
    click.echo(
        f"the nearest other text is the same for {found.neighbour_agreement:.1%}; "
        f"a text alone and in a batch differ by {parity.int8.alone_error:.1e}"
    )
    for graph in manifest.graphs:
        if graph.HasField("quantization"):
            click.echo(_describe(graph.quantization))


def _describe(quantization: "Quantization") -> str:
    """Return a line on the products, and one on the speed where the export was."""
    from attnlens.v1.quantization_pb2 import QuantizationMethod  # noqa: PLC0415 - heavy

    methods = Counter(
        QuantizationMethod.Name(product.method).removeprefix("QUANTIZATION_METHOD_").lower()
        for product in quantization.products
    )
    speeds = ", ".join(
        f"{each.batch_size} x {each.length} tokens {each.milliseconds_fp32 / each.milliseconds:.2f}"
        for each in quantization.speeds
    )
    products = ", ".join(f"{count} {method}" for method, count in methods.most_common())
    return f"products: {products}\ntimes as fast as fp32, on one thread: {speeds or 'not measured'}"
