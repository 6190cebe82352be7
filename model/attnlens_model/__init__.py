"""The encoder in PyTorch: configuration, attention, layers, and published weights."""

from attnlens_model.attention.masks import AttentionMask
from attnlens_model.attention.softmax import MultiHeadSelfAttention
from attnlens_model.attention.weights import attention_weights
from attnlens_model.checkpoint.load import Checkpoint, load_checkpoint
from attnlens_model.config import EncoderConfig, read_config
from attnlens_model.encoder import Encoder, EncoderOutput, new_encoder
from attnlens_model.errors import CheckpointError, ConfigError, ModelError

__all__ = [
    "AttentionMask",
    "Checkpoint",
    "CheckpointError",
    "ConfigError",
    "Encoder",
    "EncoderConfig",
    "EncoderOutput",
    "ModelError",
    "MultiHeadSelfAttention",
    "attention_weights",
    "load_checkpoint",
    "new_encoder",
    "read_config",
]
