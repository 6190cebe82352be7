"""How much each token of a text uses each head: a table, or numbers. T tokens, H' heads."""

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from attnlens_cli.show.attention.map import AttentionMap
from attnlens_client import Attention


def head_load(found: Attention) -> list[float]:
    """Return for each of the H' heads the share of tokens that use it."""
    shares: list[float] = found.selected[0].mean(axis=0, dtype=np.float64).tolist()
    return shares


def print_gates(attention: AttentionMap) -> None:
    """Print a row for each token; a dot is a head that the token does not use."""
    found = attention.result.attention[0]
    gates = found.weights[0]  # (T, H')
    console = Console(highlight=False, markup=False, emoji=False)
    console.print(attention.caption)
    console.print("How much each token uses each head; the load is the share of tokens that use it.")
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("token", no_wrap=True)
    for head in found.heads:
        table.add_column(str(head), justify="right", no_wrap=True)
    for number, (label, row) in enumerate(zip(attention.labels, gates, strict=True)):
        table.add_row(f"{number:>3} {label}", *("·" if gate == 0 else f"{gate:.2f}" for gate in row))
    table.add_section()
    table.add_row("load", *(f"{load:.2f}" for load in head_load(found)), style="bold")
    table.add_row("mean", *(f"{mean:.2f}" for mean in gates.mean(axis=0, dtype=np.float64)), style="bold")
    console.print(table)


def gates_as_json(attention: AttentionMap) -> dict[str, object]:
    """Return the gates and the load of each head."""
    found = attention.result.attention[0]
    return {"gates": found.weights[0].tolist(), "head_load": head_load(found)}
