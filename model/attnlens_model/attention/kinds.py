"""Registry of attention mechanisms. To add one, add its module to this package and its configuration here."""

from attnlens_model.attention.bigbird import BigBirdAttentionConfig
from attnlens_model.attention.composed import ComposedAttentionConfig
from attnlens_model.attention.disentangled import DisentangledAttentionConfig
from attnlens_model.attention.longformer import LongformerAttentionConfig
from attnlens_model.attention.mechanism import AttentionConfig
from attnlens_model.attention.mixture import MixtureAttentionConfig
from attnlens_model.attention.overlapping import OverlappingAttentionConfig
from attnlens_model.attention.softmax import SoftmaxAttentionConfig

ATTENTION_KINDS: dict[str, type[AttentionConfig]] = {
    "softmax": SoftmaxAttentionConfig,
    "disentangled": DisentangledAttentionConfig,
    "big_bird": BigBirdAttentionConfig,
    "longformer": LongformerAttentionConfig,
    "overlapping": OverlappingAttentionConfig,
    "mixture": MixtureAttentionConfig,
    "composed": ComposedAttentionConfig,
}
