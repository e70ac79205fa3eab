"""Dimensions of a decoder-only transformer: what the model code, the planner and reports share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class MoeDims:
    """Feed-forward networks made of experts; see the ``model.moe`` section for each number.

    Attributes:
        experts, top_k: routed experts of a block, and how many a token visits.
        hidden: inner width of an expert.
        shared: experts that every token visits, one network of ``shared · hidden`` channels.
        dense_layers: blocks at the start without experts.
    """

    experts: int
    top_k: int
    hidden: int
    shared: int = 0
    dense_layers: int = 0
    router: Literal["softmax", "sigmoid"] = "softmax"
    normalize: bool = True
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    capacity: float | None = None
    balance: float = 0.01
    z_loss: float = 0.0
    bias_rate: float = 0.0


@dataclass(frozen=True, slots=True)
class TransformerDims:
    """Shape of a decoder-only transformer; pure numbers.

    Attributes:
        layers: transformer blocks.
        hidden: width of the residual stream.
        heads: query heads; ``hidden`` divides into them.
        kv_heads: key and value heads (grouped-query attention); divides ``heads``.
        ffn_hidden: inner width of the feed-forward network.
        vocab_size: rows of the embedding.
        max_positions: longest sequence (rows of a learned position table).
        moe: experts in place of the feed-forward networks; None in a dense model.
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
    moe: MoeDims | None = None

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def dense_layers(self) -> int:
        """Blocks without experts; they come first."""
        return self.layers if self.moe is None else min(self.moe.dense_layers, self.layers)

    @property
    def routed_parameters(self) -> int:
        """Parameters of all routed experts of a block; 0 in a dense model."""
        moe = self.moe
        return 0 if moe is None else moe.experts * self._matrices * self.hidden * moe.hidden

    @property
    def layer_parameters(self) -> int:
        """Parameters of one block: one with all its experts, in a model that has any."""
        moe = self.moe
        if moe is None:
            return self.dense_layer_parameters
        routed = self.routed_parameters
        shared = self._ffn_parameters(moe.shared * moe.hidden) if moe.shared else 0
        router = self.hidden * moe.experts
        return self._attention_parameters + router + routed + shared + 2 * self.norm_parameters

    @property
    def dense_layer_parameters(self) -> int:
        """Parameters of one block without experts."""
        ffn = self._ffn_parameters(self.ffn_hidden)
        return self._attention_parameters + ffn + 2 * self.norm_parameters

    @property
    def _attention_parameters(self) -> int:
        bias = int(self.bias)
        qkv = (self.heads + 2 * self.kv_heads) * self.head_dim
        return self.hidden * qkv + bias * qkv + self.hidden * self.hidden + bias * self.hidden

    @property
    def _matrices(self) -> int:
        return 3 if self.activation == "swiglu" else 2

    def _ffn_parameters(self, inner: int) -> int:
        biases = int(self.bias) * ((self._matrices - 1) * inner + self.hidden)
        return self._matrices * self.hidden * inner + biases

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
        dense = self.dense_layers
        body = dense * self.dense_layer_parameters + self.norm_parameters
        body += (self.layers - dense) * self.layer_parameters
        return self.embedding_parameters + body + head

    def model_flops_per_token(self, sequence: int) -> float:
        """Forward and backward FLOPs a token, attention counted in full.

        Narayanan et al. 2021, section 3.2, without recompute and for any feed-forward
        network and number of key-value heads: 6 FLOPs a weight of every matrix product
        (the embedding look-up is none, the output layer is one) and 12·hidden·sequence a
        layer for scores and their product with the values. Linear attention writes and reads a
        state of head_dim columns a channel in place of ``sequence`` keys. Of experts only those
        count that a token visits.
        """
        seen = sequence if self.attention == "softmax" else self.head_dim
        qkv = (self.heads + 2 * self.kv_heads) * self.head_dim
        weights = self.layers * self.hidden * (qkv + self.hidden)
        weights += self.dense_layers * self.hidden * self._matrices * self.ffn_hidden
        if self.moe is not None:
            visited = (self.moe.top_k + self.moe.shared) * self._matrices * self.moe.hidden
            sparse = self.layers - self.dense_layers
            weights += sparse * self.hidden * (visited + self.moe.experts)
        weights += self.hidden * self.vocab_size
        return 6.0 * weights + 12.0 * self.layers * self.hidden * seen
