"""Shortcuts in the libraries that trace graphs: less work for the same graph."""

import functools
from typing import Any, NamedTuple

import pytest
from onnxscript.rewriter._basics import MatchResult
from onnxscript.rewriter._matcher import SimplePatternMatcher
from torch.fx.experimental.sym_node import SymNode
from torch.onnx._internal.exporter import _registration


class Shortcut(NamedTuple):
    """A replaced attribute of a library."""

    owner: Any
    name: str
    original: Any
    faster: Any


def use(shortcuts: list[Shortcut], patched: pytest.MonkeyPatch) -> None:
    """Install the shortcuts until `patched` is undone."""
    for each in shortcuts:
        patched.setattr(each.owner, each.name, each.faster)


def _cached_expression(node: Any) -> Any:
    """Return the expression of a size, without a search of its terms if it is cached."""
    shapes = node.shape_env
    if shapes is None:
        return _EXPRESSION.fget(node)
    version = shapes._replacements_version_counter
    if node._expr_cache is None or node._expr_ver != version:
        node._expr_cache, node._expr_ver = _EXPRESSION.fget(node), version
    return node._expr_cache


@functools.wraps(SimplePatternMatcher.match)
def _match_operator(matcher: Any, model: Any, graph: Any, node: Any, **options: Any) -> Any:
    """Reject a node with another operator than the pattern before all nodes of the graph are visited."""
    operator = matcher.pattern.output_nodes[0].op_identifier()
    if operator is not None and operator != node.op_identifier():
        return MatchResult().fail("another operator")
    return _MATCH(matcher, model, graph, node, **options)


_EXPRESSION: Any = vars(SymNode)["expr"]
_MATCH: Any = SimplePatternMatcher.match
_LIBRARY: Any = vars(_registration)["onnxscript_apis"]
SHORTCUTS = [
    # Otherwise 500 translations are parsed for each graph.
    Shortcut(
        _LIBRARY,
        "get_torchlib_ops",
        _LIBRARY.get_torchlib_ops,
        functools.cache(_LIBRARY.get_torchlib_ops),
    ),
    Shortcut(SymNode, "expr", _EXPRESSION, property(_cached_expression)),
    Shortcut(SimplePatternMatcher, "match", _MATCH, _match_operator),
]
