"""How much each token of a text uses each head: a table, or numbers. T tokens, H' heads."""

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from attnlens_cli.show.attention.map import AttentionMap
from attnlens_cli.show.console import make_console
from attnlens_client import Attention


def head_load(found: Attention, place: int = 0) -> list[float]:
    """Return for each of the H' heads of a layer the share of tokens that use it."""
    shares: list[float] = found.selected[place].mean(axis=0, dtype=np.float64).tolist()
    return shares


def print_gates(attention: AttentionMap) -> None:
    """Print a row for each token; a dot is a head that the token does not use."""
    found = attention.result.attention[0]
    console = make_console()
    console.print(attention.caption)
    console.print("How much each token uses each head; the load is the share of tokens that use it.")
    for place, layer in enumerate(found.layers):
        if "layers" in attention.axes:
            console.print(f"Layer {layer}:")
        _print_layer(console, attention, place)


def _print_layer(console: Console, attention: AttentionMap, place: int) -> None:
    found = attention.result.attention[0]
    gates = found.weights[place]  # (T, H')
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("token", no_wrap=True)
    for head in found.heads:
        table.add_column(str(head), justify="right", no_wrap=True)
    for number, (label, row) in enumerate(zip(attention.labels, gates, strict=True)):
        table.add_row(f"{number:>3} {label}", *("·" if gate == 0 else f"{gate:.2f}" for gate in row))
    table.add_section()
    load = head_load(found, place)
    table.add_row("load", *(f"{share:.2f}" for share in load), style="bold")
    table.add_row("mean", *(f"{mean:.2f}" for mean in gates.mean(axis=0, dtype=np.float64)), style="bold")
    console.print(table)


def gates_as_json(attention: AttentionMap) -> dict[str, object]:
    """Return the gates and the load of each head, of one layer or of each."""
    found = attention.result.attention[0]
    loads = [head_load(found, place) for place in range(len(found.layers))]
    if "layers" in attention.axes:
        return {"gates": found.weights.tolist(), "head_load": loads}
    return {"gates": found.weights[0].tolist(), "head_load": loads[0]}
