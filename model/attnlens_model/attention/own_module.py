"""Attention that a module of the user computes. The configuration only describes its weights."""

from dataclasses import dataclass

from torch import nn

from attnlens_model.attention.mechanism import EncoderSizes, SizedHeadsConfig
from attnlens_model.errors import ConfigError

# Operators of torch.onnx for common modules. Most of them run in every runtime of docs/runtimes.md.
_OPERATORS = frozenset(
    {
        "Abs", "And", "BatchNormalization", "Ceil", "Clip", "Concat", "ConstantOfShape", "Conv", "Cos",
        "CumSum", "Einsum", "Elu", "Equal", "Exp", "Expand", "Floor", "GatherElements", "Greater",
        "GreaterOrEqual", "Identity", "LeakyRelu", "Less", "LessOrEqual", "Log", "LogSoftmax", "Max", "Min",
        "Mod", "Neg", "Not", "Or", "Pad", "Pow", "Range", "Reciprocal", "ReduceMax", "ReduceMean",
        "ReduceMin", "ReduceSum", "Relu", "Shape", "Sigmoid", "Sign", "Sin", "Softplus", "Split", "Sqrt",
        "Squeeze", "Sum", "Tile", "Trilu", "Where",
    }
)  # fmt: skip


OWN_MODULE = "own_module"
"""Attention kind in the configuration of a user's module. It is not a mechanism that a user can select."""


@dataclass(frozen=True, kw_only=True)
class OwnModuleAttentionConfig(SizedHeadsConfig):
    """Describes the attention of a module that is not an `Encoder`: a user's, or one of transformers.

    Attributes:
        head_size: Head size K. Defaults to hidden_size / num_heads.
        num_key_value_heads: Number of key/value heads. Defaults to `num_heads`.
        window: Maximum distance between a query and its keys, in tokens. If None, it is unlimited.
    """

    head_size: int | None = None
    num_key_value_heads: int | None = None
    window: int | None = None

    def check_sizes(self, sizes: EncoderSizes) -> None:
        """Accept every size: the module computes with its own."""

    @property
    def edges(self) -> tuple[int, ...]:
        """Input lengths at which the window becomes smaller than the input."""
        return () if self.window is None else (self.window + 1,)

    @property
    def operators(self) -> frozenset[str]:
        """ONNX operators that the module may use in addition to those of BERT."""
        return _OPERATORS

    def make_layer(self, sizes: EncoderSizes) -> nn.Module:
        """Reject the configuration, because only the user's module computes this attention.

        Raises:
            ConfigError: Always.
        """
        del sizes
        raise ConfigError(
            f"attention.kind={self.kind!r} belongs to a module of your own, which this configuration cannot "
            "create: pass the module (attnlens_export.export_module, check_bundle)"
        )
