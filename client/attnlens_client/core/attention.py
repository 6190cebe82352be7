"""What a query brings: from `AttentionResult` to `Attention`, for all texts of a method.

Letters: T tokens of a text, L' and H' the chosen layers and heads.
"""

from collections.abc import Sequence

from attnlens.v1 import encoder_service_pb2 as pb
from attnlens.v1.manifest_pb2 import OutputRole, RowSum
from attnlens.v1.tensor_pb2 import DataType
from attnlens_client.arguments import AttentionQuery
from attnlens_client.core.checks import Agreed, check_finite, checked_array, wrong_reply, wrong_text
from attnlens_client.core.enums import name_of
from attnlens_client.core.patterns import read_patterns
from attnlens_client.core.reductions import ReductionReader
from attnlens_client.results import Attention, LayerPattern, Token


class QueryReader:
    """Reads the results of one query.

    Args:
        number: of the query in the request.
        query: what was asked for.
        data_type: of the arrays.
        agreed: what all replies of the method have in common.
    """

    def __init__(
        self, number: int, query: AttentionQuery, data_type: DataType.ValueType, agreed: Agreed
    ) -> None:
        self.query = query
        self._number = number
        self._name = f"attention[{number}]"
        self._data_type = data_type
        self._agreed = agreed
        self._reduction = (
            None if query.reduction is None else ReductionReader(query.reduction, data_type, self._name)
        )

    @property
    def joins_layers(self) -> bool:
        """Whether a result is of all layers together."""
        return self.query.reduction is not None and self.query.reduction.joins_layers

    def read(self, index: int, tokens: Sequence[Token], message: pb.AttentionResult) -> Attention:
        """Read a result of text number `index`, whose layers are not checked here.

        Raises:
            BadReplyError: it is not what was asked for.
        """
        role = name_of(OutputRole.DESCRIPTOR, message.role)
        view = name_of(pb.AttentionView.DESCRIPTOR, message.view)
        if (message.query_index, role, view) != (self._number, self.query.role, self.query.view):
            raise wrong_text(
                index, f"has {role}, {view}, of query {message.query_index} where {self._name} is due"
            )
        self._check_heads(index, message.heads)
        what = f"{self._name} of texts[{index}]"
        row_sum = name_of(RowSum.DESCRIPTOR, message.row_sum)
        self._agreed.check(f"row sum of {self._name}", row_sum, f"texts[{index}]")
        num_tokens, num_layers = len(tokens), 1 if self.joins_layers else len(message.layers)
        num_heads = 1 if self.query.view == "head_mean" else len(message.heads)
        if self._reduction is not None:
            reading = self._reduction.read(index, tokens, (num_layers, num_heads), message)
            return Attention(
                query=self.query,
                layers=tuple(message.layers),
                heads=tuple(message.heads),
                layout=message.WhichOneof("data") or "",
                row_sum=row_sum,
                weights=reading.weights,
                reduced=reading.reduced,
                special_token_mass=reading.special_token_mass,
                unit_ids=reading.unit_ids,
            )
        layout = message.WhichOneof("data")
        patterns: tuple[LayerPattern, ...] = ()
        if layout == "dense":
            shape = (num_layers, num_heads, num_tokens, num_tokens)
            weights = checked_array(message.dense, self._data_type, shape, f"weights in {what}")
        elif layout == "per_token":
            shape_per_token = (num_layers, num_tokens, num_heads)
            weights = checked_array(message.per_token, self._data_type, shape_per_token, f"rows in {what}")
        elif layout is not None:
            sizes = (num_layers, num_heads, num_tokens)
            patterns = read_patterns(message, sizes, what)
            tensor, width = getattr(message, layout), patterns[0].width if patterns else None
            weights = checked_array(tensor, self._data_type, (*sizes, width), f"rows in {what}")
        else:
            raise wrong_reply(f"{what} has a layout that is not known here: install a newer attnlens")
        self._agreed.check(f"layout of {self._name}", layout, f"texts[{index}]")
        check_finite(weights, self._name, index)
        return Attention(
            query=self.query,
            layers=tuple(message.layers),
            heads=tuple(message.heads),
            layout=layout,
            row_sum=row_sum,
            weights=weights,
            patterns=patterns,
        )

    def check_layer(self, index: int, place: int, layer: int, previous: int) -> None:
        """Check the layer in one place, from 0; `previous` is the one before, or -1."""
        asked = self.query.layers
        if asked is None:
            if layer <= previous:
                raise wrong_text(index, f"has layer {layer} after {previous} in {self._name}, out of order")
        elif place >= len(asked):
            raise wrong_text(index, f"has more than {len(asked)} layers in {self._name}")
        else:
            self._check_number("layers", "layers", asked[place], layer, index)

    def check_layers(self, index: int, layers: Sequence[int]) -> None:
        """Check all layers of a text."""
        for place, (layer, previous) in enumerate(zip(layers, (-1, *layers), strict=False)):
            self.check_layer(index, place, layer, previous)
        if self.query.layers is not None and len(layers) != len(self.query.layers):
            raise wrong_text(
                index, f"has {len(layers)} instead of {len(self.query.layers)} layers in {self._name}"
            )
        if not layers:
            raise wrong_text(index, f"has no layers in {self._name}")
        self._agreed.check(f"layers in {self._name}", tuple(layers), f"texts[{index}]")

    def _check_heads(self, index: int, heads: Sequence[int]) -> None:
        asked = range(len(heads)) if self.query.heads is None else self.query.heads
        if len(heads) != len(asked) or not heads:
            raise wrong_text(
                index, f"has {len(heads)} instead of {len(asked) or 'some'} heads in {self._name}"
            )
        if self.query.heads is None:
            self._agreed.check(f"number of heads in {self._name}", len(heads), f"texts[{index}]")
        for expected, head in zip(asked, heads, strict=True):
            self._check_number("heads", f"heads in {self._name}", expected, head, index)

    def _check_number(self, kind: str, of: str, expected: int, number: int, index: int) -> None:
        """Check a layer or a head: -1 asks for the last one, whose number shows how many there are."""
        if expected < 0 <= number:
            self._agreed.check(f"number of {of}", number - expected, f"texts[{index}]")
        elif number < 0 or number != expected:
            raise wrong_text(index, f"has {number} instead of {expected} among the {kind} in {self._name}")
