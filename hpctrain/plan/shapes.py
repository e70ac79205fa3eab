"""Shape of a transformer as the planner counts it: parameters and FLOPs, dense or with experts."""

from __future__ import annotations

from dataclasses import dataclass

from hpctrain.spec.transformer import TransformerDims


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Dimensions of a decoder-only transformer, with or without experts.

    Attributes:
        layers: blocks.
        hidden: width of the residual stream.
        heads, kv_heads: query heads, and key/value heads they share.
        head_dim: width of one head (``hidden / heads`` unless a model says otherwise).
        ffn_hidden: inner width of the feed-forward network; of one expert where there are any.
        vocab: rows of the embedding.
        gated: three feed-forward matrices (SwiGLU) instead of two.
        tied: the output layer shares the embedding's weight.
        bias: biases in linears; with ``layernorm`` also an offset in every norm.
        layernorm: LayerNorm instead of RMSNorm.
        positions: rows of a learned position table; 0 for rotary or none.
        dropout: dropout is active, which costs memory traffic and a stored mask.
        experts, topk: experts of a layer, and how many each token visits; 0: dense.
        shared_ffn: inner width of experts that every token visits, all together.
        dense_layers: blocks at the start that keep a dense network of ``dense_ffn``.
        dense_ffn: inner width of those.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn_hidden: int
    vocab: int
    gated: bool = False
    tied: bool = True
    bias: bool = True
    layernorm: bool = True
    positions: int = 0
    dropout: bool = False
    experts: int = 0
    topk: int = 0
    shared_ffn: int = 0
    dense_layers: int = 0
    dense_ffn: int = 0

    @classmethod
    def of(cls, dims: TransformerDims) -> ModelShape:
        """The shape of a job's model."""
        moe = dims.moe
        return cls(
            layers=dims.layers,
            hidden=dims.hidden,
            heads=dims.heads,
            kv_heads=dims.kv_heads,
            head_dim=dims.head_dim,
            ffn_hidden=dims.ffn_hidden if moe is None else moe.hidden,
            vocab=dims.vocab_size,
            gated=dims.activation == "swiglu",
            tied=dims.tied_embeddings,
            bias=dims.bias,
            layernorm=dims.norm == "layernorm",
            positions=dims.max_positions if dims.position == "learned" else 0,
            dropout=dims.dropout > 0,
            experts=0 if moe is None else moe.experts,
            topk=0 if moe is None else moe.top_k,
            shared_ffn=0 if moe is None else moe.shared * moe.hidden,
            dense_layers=0 if moe is None else moe.dense_layers,
            dense_ffn=0 if moe is None else dims.ffn_hidden,
        )

    # ---- parameters ------------------------------------------------------------------------

    @property
    def qkv_width(self) -> int:
        """Columns of the fused query, key and value projection."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def ffn_matrices(self) -> int:
        return 3 if self.gated else 2

    @property
    def norm_parameters(self) -> int:
        return self.hidden * (2 if self.layernorm and self.bias else 1)

    @property
    def attention_parameters(self) -> int:
        """Weights and biases of the two projections of one block."""
        width = self.heads * self.head_dim
        biases = (self.qkv_width + self.hidden) * int(self.bias)
        return self.hidden * self.qkv_width + width * self.hidden + biases

    def ffn_parameters(self, inner: int) -> int:
        """One feed-forward network of inner width ``inner``."""
        biases = ((self.ffn_matrices - 1) * inner + self.hidden) * int(self.bias)
        return self.ffn_matrices * self.hidden * inner + biases

    @property
    def expert_parameters(self) -> int:
        """All experts of one block, which have no biases; 0 in a dense model."""
        return self.experts * self.ffn_matrices * self.hidden * self.ffn_hidden

    @property
    def layer_parameters(self) -> int:
        """One block: with all its experts, router and shared experts where it has any."""
        if not self.experts:
            ffn = self.ffn_parameters(self.ffn_hidden)
        else:
            ffn = self.expert_parameters + self.hidden * self.experts
            if self.shared_ffn:
                ffn += self.ffn_parameters(self.shared_ffn)
        return self.attention_parameters + ffn + 2 * self.norm_parameters

    @property
    def whole_parameters(self) -> int:
        """Parameters of one block that every tensor-parallel rank holds whole: norms, and the
        biases that are added after a sum over ranks."""
        return 2 * self.norm_parameters + 2 * self.hidden * int(self.bias)

    def local_layer_parameters(self, tp: int) -> float:
        """Parameters of one block on a rank of ``tp``, experts left out."""
        whole = self.whole_parameters
        return (self.layer_parameters - self.expert_parameters - whole) / tp + whole

    def local_dense_parameters(self, tp: int) -> float:
        """Parameters of one of the ``dense_layers`` on a rank of ``tp``."""
        whole = self.whole_parameters
        return (self.dense_layer_parameters - whole) / tp + whole

    @property
    def dense_layer_parameters(self) -> int:
        """One of the ``dense_layers``."""
        ffn = self.ffn_parameters(self.dense_ffn or self.ffn_hidden)
        return self.attention_parameters + ffn + 2 * self.norm_parameters

    @property
    def embedding_parameters(self) -> int:
        return (self.vocab + self.positions) * self.hidden

    @property
    def parameters(self) -> int:
        """Everything; a tied output layer counts once."""
        dense = self.dense_layers if self.experts else 0
        body = (self.layers - dense) * self.layer_parameters + dense * self.dense_layer_parameters
        head = 0 if self.tied else self.vocab * self.hidden
        return body + self.norm_parameters + self.embedding_parameters + head

    # ---- FLOPs -----------------------------------------------------------------------------

    @property
    def matmul_weights(self) -> int:
        """Weights that a token is multiplied with, output layer included, look-up not."""
        attention = self.hidden * self.qkv_width + self.heads * self.head_dim * self.hidden
        per = self.ffn_matrices * self.hidden
        if not self.experts:
            body = self.layers * (attention + per * self.ffn_hidden)
        else:
            sparse = per * (self.topk * self.ffn_hidden + self.shared_ffn)
            sparse += self.hidden * self.experts
            dense = per * (self.dense_ffn or self.ffn_hidden)
            body = self.layers * attention + (self.layers - self.dense_layers) * sparse
            body += self.dense_layers * dense
        return body + self.hidden * self.vocab

    def model_flops_per_token(self, sequence: int) -> float:
        """Forward and backward, attention in full: 6 a weight + 12·layers·width·sequence.

        Narayanan et al. 2021 without recompute; equals 72·l·h²·(1 + s/(6h) + V/(12·l·h)) for
        an ungated model with ``ffn_hidden = 4·hidden``.
        """
        width = self.heads * self.head_dim
        return 6.0 * self.matmul_weights + 12.0 * self.layers * width * sequence

    def causal_flops_per_token(self, sequence: int) -> float:
        """As model_flops_per_token with only the lower triangle of attention (Megatron-Bridge)."""
        width = self.heads * self.head_dim
        return 6.0 * self.matmul_weights + 6.0 * self.layers * width * sequence

    def hardware_flops_per_token(self, sequence: int) -> float:
        """With every layer's forward done twice: 96·l·h²·(1 + s/(6h) + V/(16·l·h)).

        Narayanan et al. 2021, section 3.2, full recompute of the layers and none of the output
        layer.
        """
        layers = self.matmul_weights - self.hidden * self.vocab
        width = self.heads * self.head_dim
        forward = 2.0 * layers + 4.0 * self.layers * width * sequence
        return 4.0 * forward + 6.0 * self.hidden * self.vocab
