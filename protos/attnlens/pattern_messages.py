"""Conversion of attention patterns to and from the messages of the manifest."""

from attnlens.bundle import BundleError
from attnlens.patterns import Band, BlockTable, IndexArray, Pattern
from attnlens.tensors import fill_tensor, from_tensor
from attnlens.v1 import manifest_pb2
from attnlens.v1.manifest_pb2 import GraphOutput, OutputLayout
from attnlens.v1.tensor_pb2 import DataType, Tensor

# Larger than any position table, and small enough that sums and products do not overflow.
_MAX_VALUE = 1 << 24
_PATTERN_FIELDS = {
    OutputLayout.OUTPUT_LAYOUT_BAND: "band",
    OutputLayout.OUTPUT_LAYOUT_BLOCKS: "block_table",
}
_NUM_TABLE_AXES = 3
_REMEDY = "export the bundle again"


def write_pattern(output: GraphOutput, pattern: Pattern | None) -> None:
    """Set the pattern of a graph output."""
    match pattern:
        case Band(window_radius, num_global_tokens):
            output.band.window_radius, output.band.num_global_tokens = window_radius, num_global_tokens
        case BlockTable(block_size, max_full_blocks, random_blocks):
            table = output.block_table
            table.block_size, table.max_full_blocks = block_size, max_full_blocks
            fill_tensor(table.random_blocks, random_blocks, DataType.DATA_TYPE_INT32)


def read_pattern(output: GraphOutput) -> Pattern | None:
    """Return the pattern of a graph output, or None for a layout without a pattern.

    Raises:
        BundleError: The pattern is missing or invalid.
    """
    expected, actual = _PATTERN_FIELDS.get(output.layout), output.WhichOneof("pattern")
    name = output.value.name
    if expected != actual:
        raise BundleError(
            f"output {name} has the pattern {actual}, but its layout needs {expected}: {_REMEDY}"
        )
    if actual == "band":
        return _read_band(name, output.band)
    return _read_table(name, output.block_table, output.num_heads) if actual else None


def _read_band(name: str, message: manifest_pb2.Band) -> Band:
    for field, value in (
        ("window_radius", message.window_radius),
        ("num_global_tokens", message.num_global_tokens),
    ):
        if not 0 <= value <= _MAX_VALUE:
            raise BundleError(
                f"output {name} has {field}={value}, outside the range 0 to {_MAX_VALUE}: {_REMEDY}"
            )
    return Band(message.window_radius, message.num_global_tokens)


def _read_table(name: str, message: manifest_pb2.BlockTable, num_heads: int) -> BlockTable:
    for field, value, minimum in (
        ("block_size", message.block_size, 1),
        ("max_full_blocks", message.max_full_blocks, 0),
    ):
        if not minimum <= value <= _MAX_VALUE:
            raise BundleError(
                f"output {name} has {field}={value}, outside the range {minimum} to {_MAX_VALUE}: {_REMEDY}"
            )
    random_blocks = _read_indices(message.random_blocks)
    if random_blocks is None or random_blocks.ndim != _NUM_TABLE_AXES or len(random_blocks) != num_heads:
        raise BundleError(
            f"output {name} has an invalid block table, or its table is not for {num_heads} heads: {_REMEDY}"
        )
    if random_blocks.size and int(random_blocks.min()) < -1:
        raise BundleError(f"output {name} has a block table with entries below -1: {_REMEDY}")
    return BlockTable(message.block_size, message.max_full_blocks, random_blocks)


def _read_indices(tensor: Tensor) -> IndexArray | None:
    """Return the values of a valid int32 tensor, otherwise None."""
    try:
        array = from_tensor(tensor)
    except ValueError:
        return None
    return array if tensor.data_type == DataType.DATA_TYPE_INT32 else None
