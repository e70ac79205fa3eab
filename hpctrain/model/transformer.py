"""Decoder-only transformer, whole or any range of its layers.

Shapes are written as suffixes: B samples, S positions, H width of the residual stream,
N query heads, K key-value heads, D width of a head, F inner width of the feed-forward
network, V vocabulary. A dimension that tensor or context parallelism may cut (S, N, K, F, V)
is read off the tensors at hand, never off the dims, so the modules work on local parts too.

Parameters of a stage have the names they have in the whole model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hpctrain.model.dropout import Dropout
from hpctrain.model.linear_attention import LinearAttention
from hpctrain.model.moe import MixtureOfExperts
from hpctrain.model.stream import piecewise, streamed_loss
from hpctrain.spec.transformer import TransformerDims


class Embedding(nn.Module):
    """Token embedding, plus a learned position table where the dims ask for one."""

    def __init__(self, dims: TransformerDims, **factory: Any) -> None:
        super().__init__()
        self.tokens = nn.Embedding(dims.vocab_size, dims.hidden, **factory)
        self.positions = (
            nn.Embedding(dims.max_positions, dims.hidden, **factory)
            if dims.position == "learned"
            else None
        )
        self.dropout = Dropout(dims.dropout, "embedding")

    def forward(
        self,
        tokens_BS: Tensor,
        positions: Tensor,
        keys: Tensor | None,
        starts: Tensor | None = None,
    ) -> Tensor:
        x_BSH = self.tokens(tokens_BS)
        if self.positions is not None:
            x_BSH = x_BSH + self.positions(places_in_documents(positions, starts))
        return self.dropout(x_BSH, keys, positions)  # type: ignore[no-any-return]


def places_in_documents(positions: Tensor, starts: Tensor | None) -> Tensor:
    """Place of each token in its document; ``positions`` themselves where there are no starts.

    Args:
        positions: (S,) int64 of the tokens at hand, in the whole sequence.
        starts: (B, whole sequence) int64, place of the first token of each token's document.
    """
    return positions if starts is None else positions - starts[:, positions]


class CausalAttention(nn.Module):
    """softmax(q·kᵀ/√D + causal mask)·v; a module so that another kind can take its place."""

    def forward(
        self, q_BNSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, starts_BS: Tensor | None = None
    ) -> Tensor:
        """Attention over whole sequences.

        Args:
            q_BNSD, k_BKSD, v_BKSD: K divides N.
            starts_BS: place of the first token of each token's document; a token sees its own
                document only. Without, a sequence is one document.
        """
        grouped = q_BNSD.shape[1] != k_BKSD.shape[1]
        if starts_BS is None:
            return F.scaled_dot_product_attention(
                q_BNSD, k_BKSD, v_BKSD, is_causal=True, enable_gqa=grouped
            )
        samples = []
        for sample, row in enumerate(starts_BS.cpu()):
            _, lengths = torch.unique_consecutive(row, return_counts=True)
            parts = [
                torch.split(x[sample : sample + 1], lengths.tolist(), 2)
                for x in (q_BNSD, k_BKSD, v_BKSD)
            ]
            documents = [
                F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
                for q, k, v in zip(*parts, strict=True)
            ]
            samples.append(torch.cat(documents, dim=2))
        return torch.cat(samples)


class Attention(nn.Module):
    """Causal self-attention with grouped key-value heads (Ainslie et al. 2023)."""

    def __init__(self, dims: TransformerDims, **factory: Any) -> None:
        super().__init__()
        self.head_dim = dims.head_dim
        self.rope_theta = dims.rope_theta if dims.position == "rotary" else None
        kv = dims.kv_heads * dims.head_dim
        self.query = nn.Linear(dims.hidden, dims.hidden, bias=dims.bias, **factory)
        self.key = nn.Linear(dims.hidden, kv, bias=dims.bias, **factory)
        self.value = nn.Linear(dims.hidden, kv, bias=dims.bias, **factory)
        self.core: nn.Module = CausalAttention()
        if dims.attention == "linear":
            self.core = LinearAttention(dims.heads, dims.norm_eps)
        self.output = nn.Linear(dims.hidden, dims.hidden, bias=dims.bias, **factory)

    def forward(self, x_BSH: Tensor, positions: Tensor, starts: Tensor | None = None) -> Tensor:
        q_BSND = self.query(x_BSH).unflatten(-1, (-1, self.head_dim))
        k_BSKD = self.key(x_BSH).unflatten(-1, (-1, self.head_dim))
        v_BSKD = self.value(x_BSH).unflatten(-1, (-1, self.head_dim))
        if self.rope_theta is not None:
            q_BSND = rotate(q_BSND, positions, self.rope_theta)
            k_BSKD = rotate(k_BSKD, positions, self.rope_theta)
        q_BNSD, k_BKSD, v_BKSD = (x.transpose(1, 2) for x in (q_BSND, k_BSKD, v_BSKD))
        y_BNSD = self.core(q_BNSD, k_BKSD, v_BKSD, starts)
        return self.output(y_BNSD.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


def rotate(x_BSND: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotary position embedding (Su et al. 2021, equation 34).

    Channel i of a head is paired with channel i + D/2 (the GPT-NeoX and Llama-on-Hugging-Face
    order, not neighbours) and turned by position·theta^(−2i/D), in float32 at least.

    Args:
        x_BSND: queries or keys.
        positions: (S,) or (B, S) int64.
        theta: base of the frequencies.
    """
    half = x_BSND.shape[-1] // 2
    dtype = torch.promote_types(x_BSND.dtype, torch.float32)
    exponent = torch.arange(half, device=x_BSND.device, dtype=dtype) / half
    angle = (positions.to(dtype).unsqueeze(-1) * theta**-exponent).unsqueeze(-2)  # (…, S, 1, D/2)
    cos, sin = angle.cos(), angle.sin()
    x = x_BSND.to(dtype)
    swapped = torch.cat((x[..., half:], x[..., :half]), dim=-1)
    # Two passes over x; the four products written out one by one take half as long again.
    turned = torch.addcmul(
        x * torch.cat((cos, cos), dim=-1), swapped, torch.cat((-sin, sin), dim=-1)
    )
    return turned.to(x_BSND.dtype)


class FeedForward(nn.Module):
    """down(gelu(up(x))), or down(silu(gate(x))·up(x)) (SwiGLU, Shazeer 2020).

    GELU is the tanh form (Hendrycks and Gimpel 2016), as in GPT-2.
    """

    def __init__(self, dims: TransformerDims, inner: int, **factory: Any) -> None:
        super().__init__()
        self.up = nn.Linear(dims.hidden, inner, bias=dims.bias, **factory)
        self.gate = (
            nn.Linear(dims.hidden, inner, bias=dims.bias, **factory)
            if dims.activation == "swiglu"
            else None
        )
        self.down = nn.Linear(inner, dims.hidden, bias=dims.bias, **factory)

    def forward(self, x_BSH: Tensor) -> Tensor:
        y_BSF = self.up(x_BSH)
        if self.gate is None:
            y_BSF = F.gelu(y_BSF, approximate="tanh")
        else:
            y_BSF = F.silu(self.gate(x_BSH)) * y_BSF
        return self.down(y_BSF)  # type: ignore[no-any-return]


class Block(nn.Module):
    """One layer: x + attention(norm(x)), then x + ffn(norm(x)).

    Its arguments beside x are integers: mixed precision, which casts the floating inputs of a
    module, leaves positions and keys as they are.
    """

    def __init__(self, dims: TransformerDims, index: int, **factory: Any) -> None:
        super().__init__()
        self.attention_norm = _norm(dims, **factory)
        self.attention = Attention(dims, **factory)
        self.attention_dropout = Dropout(dims.dropout, f"layers.{index}.attention")
        self.ffn_norm = _norm(dims, **factory)
        self.ffn = _feed_forward(dims, index, **factory)
        self.ffn_dropout = Dropout(dims.dropout, f"layers.{index}.ffn")
        self.piece: int | None = None

    def forward(
        self,
        x_BSH: Tensor,
        positions: Tensor,
        keys: Tensor | None = None,
        starts: Tensor | None = None,
    ) -> Tensor:
        """Shapes: x (B, S, H); positions (S,) or (B, S); keys (B,), needed for dropout only;
        starts (B, whole sequence), see :meth:`Transformer.forward`."""
        y_BSH = self.attention(self.attention_norm(x_BSH), positions, starts)
        x_BSH = x_BSH + self.attention_dropout(y_BSH, keys, positions)
        if self.piece is None:
            y_BSH = self._feed_forward(x_BSH)
        else:
            y_BSH = piecewise(self._feed_forward, x_BSH, self.piece)
        return x_BSH + self.ffn_dropout(y_BSH, keys, positions)  # type: ignore[no-any-return]

    def _feed_forward(self, x_BSH: Tensor) -> Tensor:
        return self.ffn(self.ffn_norm(x_BSH))  # type: ignore[no-any-return]


class Transformer(nn.Module):
    """A decoder-only transformer, or a stage of one.

    Weights are not initialised here; see :func:`hpctrain.model.init.init_parameters`.

    Args:
        dims: of the whole model.
        layers: global indices of the layers held; all without.
        has_embedding: holds the embedding; forward then takes tokens.
        has_head: holds the last norm and the output layer; forward then returns logits.
        device, dtype: of the parameters.
    """

    def __init__(
        self,
        dims: TransformerDims,
        *,
        layers: range | None = None,
        has_embedding: bool = True,
        has_head: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        layers = range(dims.layers) if layers is None else layers
        if any(not 0 <= index < dims.layers for index in layers):
            raise ValueError(f"layers {layers} of a model of {dims.layers}")
        factory = {"device": device, "dtype": dtype}
        self.dims = dims
        self.embedding = Embedding(dims, **factory) if has_embedding else None
        self.layers = nn.ModuleDict({str(index): Block(dims, index, **factory) for index in layers})
        self.norm = _norm(dims, **factory) if has_head else None
        self.head = (
            nn.Linear(dims.hidden, dims.vocab_size, bias=False, **factory) if has_head else None
        )
        # Where ranks hold slices of the residual stream, its length is not the sequence's.
        self.sequence_shards = 1
        self._loss: tuple[Callable[[Tensor, Tensor], Tensor], int] | None = None
        self._tie()

    @property
    def logical_names(self) -> Mapping[str, str]:
        """Parameters of this stage that the whole model knows by another name.

        A tied output layer is the embedding's weight; on a stage of its own it is a parameter
        (and its gradient has to be summed with that of the embedding's stage).
        """
        if self.dims.tied_embeddings and self.head is not None and self.embedding is None:
            return {"head.weight": "embedding.tokens.weight"}
        return {}

    def forward(
        self,
        inputs: Tensor,
        keys: Tensor | None = None,
        positions: Tensor | None = None,
        starts: Tensor | None = None,
        targets: Tensor | None = None,
    ) -> Tensor:
        """Logits (B, S, V), or the residual stream (B, S, H) of a stage without a head.

        After :meth:`stream` and with targets the mean loss, in place of logits.

        Args:
            inputs: tokens (B, S) int64, or (B, S, H) of the stage before.
            keys: (B,) int64 of :func:`hpctrain.model.dropout.dropout_keys`; needed in
                training with dropout.
            positions: (S,) or (B, S) int64, place of each token in its sequence; 0 … S−1
                without.
            starts: (B, whole sequence) int64, place of the first token of each token's document:
                a token attends to its own document and learned positions count from its start.
                Without, a sequence is one document.
            targets: (B, S) int64.

        Raises:
            ValueError: dropout without keys.
        """
        if positions is None:
            length = inputs.shape[1] * (self.sequence_shards if self.embedding is None else 1)
            positions = torch.arange(length, device=inputs.device)
        x = inputs
        if self.embedding is not None:
            x = self.embedding(x, positions, keys, starts)
        for block in self.layers.values():
            x = block(x, positions, keys, starts)
        if self.head is None:
            return x
        if targets is None:
            return self.forward_head(x)
        assert self.norm is not None and self._loss is not None, "stream() comes first"
        loss, tokens = self._loss
        return streamed_loss(self.norm(x), self.head, [self.head.weight], loss, targets, tokens)

    def stream(self, tokens: int, token_loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        """Let feed-forward networks and the output layer work on a piece at a time.

        Args:
            tokens: of each sequence in a piece.
            token_loss: (logits, targets) -> mean loss.
        """
        self._loss = token_loss, tokens
        for block in self.layers.values():
            assert isinstance(block, Block)
            # A router looks at whole sequences, and experts work on a few rows at a time anyway.
            if isinstance(block.ffn, FeedForward):
                block.piece = tokens

    def forward_head(self, x_BSH: Tensor) -> Tensor:
        """Last norm and output layer: logits (B, S, V)."""
        assert self.norm is not None and self.head is not None, "this stage has no head"
        return self.head(self.norm(x_BSH))  # type: ignore[no-any-return]

    def _tie(self) -> None:
        if self.dims.tied_embeddings and self.embedding is not None and self.head is not None:
            self.head.weight = self.embedding.tokens.weight

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # to_empty() and, between some devices, to() make a new parameter of every use.
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._tie()
        return self


def next_token_loss(logits_BSV: Tensor, targets_BS: Tensor) -> Tensor:
    """Mean cross entropy, nats a token, in float32 at least.

    Args:
        logits_BSV: any floating type.
        targets_BS: int64; the token that follows each position.
    """
    logits = logits_BSV.flatten(0, 1)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits, targets_BS.flatten())


def _feed_forward(dims: TransformerDims, index: int, **factory: Any) -> nn.Module:
    """Of the block with this number: dense, or made of experts."""
    moe = dims.moe
    if moe is None or index < moe.dense_layers:
        return FeedForward(dims, dims.ffn_hidden, **factory)
    shared = FeedForward(dims, moe.shared * moe.hidden, **factory) if moe.shared else None
    return MixtureOfExperts(dims, shared, **factory)


def _norm(dims: TransformerDims, **factory: Any) -> nn.Module:
    if dims.norm == "layernorm":
        return nn.LayerNorm(dims.hidden, eps=dims.norm_eps, bias=dims.bias, **factory)
    return nn.RMSNorm(dims.hidden, eps=dims.norm_eps, **factory)
