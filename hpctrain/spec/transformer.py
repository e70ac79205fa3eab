"""Dimensions of a decoder-only transformer: what the model code, the planner and reports share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class TransformerDims:
    """Shape of a dense decoder-only transformer; pure numbers.

    Attributes:
        layers: transformer blocks.
        hidden: width of the residual stream.
        heads: query heads; ``hidden`` divides into them.
        kv_heads: key and value heads (grouped-query attention); divides ``heads``.
        ffn_hidden: inner width of the feed-forward network.
        vocab_size: rows of the embedding.
        max_positions: longest sequence (rows of a learned position table).
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn_hidden: int
    vocab_size: int
    max_positions: int
    attention: Literal["softmax", "linear"] = "softmax"
    position: Literal["learned", "rotary", "none"] = "learned"
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    activation: Literal["gelu", "swiglu"] = "gelu"
    tied_embeddings: bool = True
    bias: bool = True
    dropout: float = 0.0
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    init_std: float = 0.02

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def layer_parameters(self) -> int:
        """Parameters of one block."""
        bias = int(self.bias)
        qkv = (self.heads + 2 * self.kv_heads) * self.head_dim
        attention = self.hidden * qkv + bias * qkv + self.hidden * self.hidden + bias * self.hidden
        inner = self.ffn_hidden * (2 if self.activation == "swiglu" else 1)
        ffn = self.hidden * inner + bias * inner + self.ffn_hidden * self.hidden
        ffn += bias * self.hidden
        return attention + ffn + 2 * self.norm_parameters

    @property
    def norm_parameters(self) -> int:
        """Parameters of one norm: gain, and offset for LayerNorm with biases."""
        return self.hidden * (2 if self.norm == "layernorm" and self.bias else 1)

    @property
    def embedding_parameters(self) -> int:
        positions = self.max_positions if self.position == "learned" else 0
        return (self.vocab_size + positions) * self.hidden

    @property
    def parameters(self) -> int:
        """All parameters; a tied output layer counts once."""
        head = 0 if self.tied_embeddings else self.vocab_size * self.hidden
        body = self.layers * self.layer_parameters + self.norm_parameters
        return self.embedding_parameters + body + head

    def model_flops_per_token(self, sequence: int) -> float:
        """Forward and backward FLOPs a token, attention counted in full.

        Narayanan et al. 2021, section 3.2, without recompute and for any feed-forward
        network and number of key-value heads: 6 FLOPs a weight of every matrix product
        (the embedding look-up is none, the output layer is one) and 12·hidden·sequence a
        layer for scores and their product with the values. Linear attention writes and reads a
        state of head_dim columns a channel in place of ``sequence`` keys.
        """
        seen = sequence if self.attention == "softmax" else self.head_dim
        qkv = (self.heads + 2 * self.kv_heads) * self.head_dim
        inner = self.ffn_hidden * (3 if self.activation == "swiglu" else 2)
        weights = self.layers * self.hidden * (qkv + self.hidden + inner)
        weights += self.hidden * self.vocab_size
        return 6.0 * weights + 12.0 * self.layers * self.hidden * seen
