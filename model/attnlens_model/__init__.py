"""Transformer encoders in PyTorch: configuration, attention mechanisms, layers and checkpoint loading."""

from attnlens_model.attention.bigbird import BigBirdAttentionConfig
from attnlens_model.attention.disentangled import DisentangledAttentionConfig
from attnlens_model.attention.longformer import LongformerAttentionConfig
from attnlens_model.attention.mechanism import (
    ATTENTION_WEIGHTS,
    AttentionConfig,
    AttentionOutput,
    EncoderSizes,
    OutputRole,
)
from attnlens_model.attention.parts.masks import AttentionMask
from attnlens_model.attention.parts.relative_bias import RelativeBiasConfig
from attnlens_model.attention.parts.rotary import RotaryConfig
from attnlens_model.attention.parts.weights import attention_weights
from attnlens_model.attention.softmax import MultiHeadSelfAttention, SoftmaxAttentionConfig
from attnlens_model.checkpoint.adapters import NO_TASK
from attnlens_model.checkpoint.load import Checkpoint, load_checkpoint
from attnlens_model.checkpoint.published import new_published
from attnlens_model.checkpoint.staging import CodeHook, StagedCheckpoint, open_checkpoint
from attnlens_model.config import EncoderConfig, read_config
from attnlens_model.convolution import ConvolutionConfig
from attnlens_model.embeddings import EmbeddingsConfig, PositionsConfig
from attnlens_model.encoder import Encoder, EncoderOutput, new_encoder
from attnlens_model.errors import CheckpointError, ConfigError, ModelError
from attnlens_model.feed_forward import FeedForwardConfig
from attnlens_model.module_encoder import MODULE_PREFIX, ModuleEncoder, wrap_module
from attnlens_model.norm import NormConfig

__all__ = [
    "ATTENTION_WEIGHTS",
    "MODULE_PREFIX",
    "NO_TASK",
    "AttentionConfig",
    "AttentionMask",
    "AttentionOutput",
    "BigBirdAttentionConfig",
    "Checkpoint",
    "CheckpointError",
    "CodeHook",
    "ConfigError",
    "ConvolutionConfig",
    "DisentangledAttentionConfig",
    "EmbeddingsConfig",
    "Encoder",
    "EncoderConfig",
    "EncoderOutput",
    "EncoderSizes",
    "FeedForwardConfig",
    "LongformerAttentionConfig",
    "ModelError",
    "ModuleEncoder",
    "MultiHeadSelfAttention",
    "NormConfig",
    "OutputRole",
    "PositionsConfig",
    "RelativeBiasConfig",
    "RotaryConfig",
    "SoftmaxAttentionConfig",
    "StagedCheckpoint",
    "attention_weights",
    "load_checkpoint",
    "new_encoder",
    "new_published",
    "open_checkpoint",
    "read_config",
    "wrap_module",
]
