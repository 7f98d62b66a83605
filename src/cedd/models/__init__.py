"""The network, its averaged weights, and how they are stored."""

from cedd.models.ema import EMA
from cedd.models.head import VocabularyHead
from cedd.models.kernels.head_loss import RowLosses, chunked_head_loss, linear_cross_entropy, linear_score_entropy
from cedd.models.transformer import SIZES, KVCache, Transformer, TransformerConfig, config_from_preset
from cedd.models.weights import load_weights, read_weights, save_weights

__all__ = [
    "EMA",
    "SIZES",
    "KVCache",
    "RowLosses",
    "Transformer",
    "TransformerConfig",
    "VocabularyHead",
    "chunked_head_loss",
    "config_from_preset",
    "linear_cross_entropy",
    "linear_score_entropy",
    "load_weights",
    "read_weights",
    "save_weights",
]
