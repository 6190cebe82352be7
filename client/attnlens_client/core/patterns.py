"""Between which tokens a reply has weights. L layers, H heads, C blocks of a text, S slots of a block."""

from attnlens.patterns import Band, Blocks
from attnlens.v1 import encoder_service_pb2 as pb
from attnlens.v1.tensor_pb2 import DataType
from attnlens_client.core.checks import checked_array, wrong_reply
from attnlens_client.results import LayerPattern

MAX_SIZE = 1 << 24


def read_patterns(
    message: pb.AttentionResult, sizes: tuple[int, int, int], what: str
) -> tuple[LayerPattern, ...]:
    """Return the pattern of each layer of a band or of blocks.

    Args:
        message: with one of the two.
        sizes: the numbers of layers, heads and tokens.
        what: to call it in an error.

    Raises:
        BadReplyError: it can't be.
    """
    num_layers, num_heads, num_tokens = sizes
    if message.WhichOneof("data") == "band":
        band = message.band_pattern
        if not 0 <= band.window_radius <= MAX_SIZE or not 0 <= band.num_global_tokens <= MAX_SIZE:
            raise wrong_reply(
                f"{what} has a window radius of {band.window_radius}, {band.num_global_tokens} global tokens"
            )
        return (Band(band.window_radius, band.num_global_tokens),) * num_layers
    size = message.block_pattern.block_size
    if size < 1:
        raise wrong_reply(f"{what} has blocks of {size} tokens")
    num_blocks = -(-num_tokens // size)
    key_blocks = checked_array(
        message.block_pattern.key_blocks,
        DataType.DATA_TYPE_INT32,
        (num_layers, num_heads, num_blocks, None),
        f"numbers of blocks in {what}",
    )
    if key_blocks.size and not -1 <= int(key_blocks.min()) <= int(key_blocks.max()) < num_blocks:
        raise wrong_reply(f"{what} has {num_blocks} blocks and names others")
    return tuple(Blocks(size, layer) for layer in key_blocks)
