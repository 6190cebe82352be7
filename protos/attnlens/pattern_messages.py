"""Patterns of attention to messages of the manifest and back."""

from attnlens.bundle import BundleError
from attnlens.patterns import Band, BlockTable, IndexArray, Pattern
from attnlens.tensors import fill_tensor, from_tensor
from attnlens.v1 import manifest_pb2
from attnlens.v1.manifest_pb2 import GraphOutput, OutputLayout
from attnlens.v1.tensor_pb2 import DataType, Tensor

# Beyond any table of positions; so that sums and products of them stay small numbers.
_MOST = 1 << 24
_LAYOUTS = {
    OutputLayout.OUTPUT_LAYOUT_BAND: "band",
    OutputLayout.OUTPUT_LAYOUT_BLOCKS: "block_table",
}
_TABLE_AXES = 3


def write_pattern(output: GraphOutput, pattern: Pattern | None) -> None:
    """Write the pattern of an output of a graph into its description."""
    match pattern:
        case Band(window_radius, num_global_tokens):
            output.band.window_radius, output.band.num_global_tokens = window_radius, num_global_tokens
        case BlockTable(block_size, max_full_blocks, random_blocks):
            table = output.block_table
            table.block_size, table.max_full_blocks = block_size, max_full_blocks
            fill_tensor(table.random_blocks, random_blocks, DataType.DATA_TYPE_INT32)


def read_pattern(output: GraphOutput) -> Pattern | None:
    """Return the pattern of an output of a graph; None where its layout has none.

    Raises:
        BundleError: it is missing or can't be.
    """
    wanted, found = _LAYOUTS.get(output.layout), output.WhichOneof("pattern")
    name = output.value.name
    if wanted != found:
        raise BundleError(f"{name} is stated with the pattern {found} instead of {wanted}")
    if found == "band":
        return _read_band(name, output.band)
    return _read_table(name, output.block_table, output.num_heads) if found else None


def _read_band(name: str, message: manifest_pb2.Band) -> Band:
    for field, value in (
        ("window_radius", message.window_radius),
        ("num_global_tokens", message.num_global_tokens),
    ):
        if not 0 <= value <= _MOST:
            raise BundleError(f"{name} is stated with {field}={value}: it must be from 0 to {_MOST}")
    return Band(message.window_radius, message.num_global_tokens)


def _read_table(name: str, message: manifest_pb2.BlockTable, num_heads: int) -> BlockTable:
    for field, value, least in (
        ("block_size", message.block_size, 1),
        ("max_full_blocks", message.max_full_blocks, 0),
    ):
        if not least <= value <= _MOST:
            raise BundleError(f"{name} is stated with {field}={value}: it must be from {least} to {_MOST}")
    random_blocks = _indices(message.random_blocks)
    if random_blocks is None or random_blocks.ndim != _TABLE_AXES or len(random_blocks) != num_heads:
        raise BundleError(f"{name} is stated with a table of blocks that does not fit its {num_heads} heads")
    if random_blocks.size and int(random_blocks.min()) < -1:
        raise BundleError(f"{name} is stated with a table of blocks with numbers below -1")
    return BlockTable(message.block_size, message.max_full_blocks, random_blocks)


def _indices(tensor: Tensor) -> IndexArray | None:
    """Return the numbers of an int32 tensor; None where it holds something else."""
    try:
        array = from_tensor(tensor)
    except ValueError:
        return None
    return array if tensor.data_type == DataType.DATA_TYPE_INT32 else None
