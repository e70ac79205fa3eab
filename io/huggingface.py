"""Names and shapes of Hugging Face's GPT-2 and Llama for our dense transformers, both ways.

GPT-2's projections are stored transposed and query, key and value in one (its Conv1D); Llama's
are as ours, with the same pairing of rotary channels. Nothing is computed, so a round trip
gives back every bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from hpctrain.errors import CheckpointError

Model = Mapping[str, Any]
"""The job's section ``model``, as a checkpoint holds it among its scalars."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A tensor there, and ours that make it: concatenated along rows, then perhaps transposed."""

    name: str
    ours: tuple[str, ...]
    transposed: bool = False

    def export(self, load: Callable[[str], np.ndarray]) -> np.ndarray:
        parts = [load(name) for name in self.ours]
        whole = parts[0] if len(parts) == 1 else np.concatenate(parts)
        return whole.T if self.transposed else whole

    def take(self, array: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
        """Ours out of theirs."""
        whole = array.T if self.transposed else array
        yield from zip(self.ours, np.split(whole, len(self.ours)), strict=True)


def family(model: Model) -> str:
    """``gpt2`` or ``llama``.

    Raises:
        CheckpointError: the model is neither; names what is in the way.
    """
    gpt2 = {"position": "learned", "norm": "layernorm", "activation": "gelu", "bias": True,
            "tied_embeddings": True}  # fmt: skip
    llama = {"position": "rotary", "norm": "rmsnorm", "activation": "swiglu", "bias": False}
    if model.get("module") is not None:
        raise CheckpointError("a model of one's own has no Hugging Face layout")
    same_heads = model.get("kv_heads") in (None, model.get("heads"))
    if all(model.get(key) == value for key, value in gpt2.items()) and same_heads:
        return "gpt2"
    if all(model.get(key) == value for key, value in llama.items()):
        return "llama"
    raise CheckpointError(
        "this model is neither a GPT-2 nor a Llama: "
        + ", ".join(f"{key} {model.get(key)}" for key in gpt2),
        hint="export it as plain safetensors (--format safetensors), under our names",
    )


def rules(model: Model) -> list[Rule]:
    """Every tensor of the layout of :func:`family`."""
    make = _gpt2 if family(model) == "gpt2" else _llama
    return list(make(model))


def _gpt2(model: Model) -> Iterator[Rule]:
    root = "transformer"
    yield Rule(f"{root}.wte.weight", ("embedding.tokens.weight",))
    yield Rule(f"{root}.wpe.weight", ("embedding.positions.weight",))
    for layer in range(model["layers"]):
        ours, theirs = f"layers.{layer}", f"{root}.h.{layer}"
        for kind in ("weight", "bias"):
            turned = kind == "weight"
            heads = tuple(f"{ours}.attention.{p}.{kind}" for p in ("query", "key", "value"))
            yield Rule(f"{theirs}.ln_1.{kind}", (f"{ours}.attention_norm.{kind}",))
            yield Rule(f"{theirs}.attn.c_attn.{kind}", heads, turned)
            yield Rule(f"{theirs}.attn.c_proj.{kind}", (f"{ours}.attention.output.{kind}",), turned)
            yield Rule(f"{theirs}.ln_2.{kind}", (f"{ours}.ffn_norm.{kind}",))
            yield Rule(f"{theirs}.mlp.c_fc.{kind}", (f"{ours}.ffn.up.{kind}",), turned)
            yield Rule(f"{theirs}.mlp.c_proj.{kind}", (f"{ours}.ffn.down.{kind}",), turned)
    for kind in ("weight", "bias"):
        yield Rule(f"{root}.ln_f.{kind}", (f"norm.{kind}",))


def _llama(model: Model) -> Iterator[Rule]:
    yield Rule("model.embed_tokens.weight", ("embedding.tokens.weight",))
    pairs = {
        "input_layernorm": "attention_norm",
        "self_attn.q_proj": "attention.query",
        "self_attn.k_proj": "attention.key",
        "self_attn.v_proj": "attention.value",
        "self_attn.o_proj": "attention.output",
        "post_attention_layernorm": "ffn_norm",
        "mlp.gate_proj": "ffn.gate",
        "mlp.up_proj": "ffn.up",
        "mlp.down_proj": "ffn.down",
    }
    for layer in range(model["layers"]):
        for theirs, ours in pairs.items():
            yield Rule(f"model.layers.{layer}.{theirs}.weight", (f"layers.{layer}.{ours}.weight",))
    yield Rule("model.norm.weight", ("norm.weight",))
    if not model["tied_embeddings"]:
        yield Rule("lm_head.weight", ("head.weight",))


def to_config(model: Model, torch_dtype: str) -> dict[str, Any]:
    """Hugging Face's ``config.json`` of a model."""
    kind = family(model)
    if kind == "gpt2":
        return {
            "architectures": ["GPT2LMHeadModel"],
            "model_type": "gpt2",
            "n_layer": model["layers"],
            "n_embd": model["hidden"],
            "n_head": model["heads"],
            "n_inner": model["ffn_hidden"],
            "n_positions": model["max_positions"],
            "vocab_size": model["vocab_size"],
            "activation_function": "gelu_new",
            "layer_norm_epsilon": model["norm_eps"],
            "resid_pdrop": model["dropout"],
            "embd_pdrop": model["dropout"],
            "attn_pdrop": 0.0,
            "tie_word_embeddings": True,
            "torch_dtype": torch_dtype,
        }
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": model["layers"],
        "hidden_size": model["hidden"],
        "num_attention_heads": model["heads"],
        "num_key_value_heads": model["kv_heads"],
        "intermediate_size": model["ffn_hidden"],
        "max_position_embeddings": model["max_positions"],
        "vocab_size": model["vocab_size"],
        "hidden_act": "silu",
        "rms_norm_eps": model["norm_eps"],
        "rope_theta": model["rope_theta"],
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": model["tied_embeddings"],
        "torch_dtype": torch_dtype,
    }


def from_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The job's section ``model`` of a ``config.json``.

    Raises:
        CheckpointError: another model type, or an option that our transformer has not.
    """
    kind = config.get("model_type")
    try:
        if kind == "gpt2":
            return _from_gpt2(config)
        if kind == "llama":
            return _from_llama(config)
    except KeyError as error:
        raise CheckpointError(f"config.json: {error} is missing") from None
    raise CheckpointError(f"config.json: model_type {kind!r} is neither gpt2 nor llama")


def _from_gpt2(config: Mapping[str, Any]) -> dict[str, Any]:
    _refuse(config, "activation_function", {"gelu_new", "gelu_pytorch_tanh"}, "gelu_new")
    _refuse(config, "scale_attn_weights", {True}, True)
    _refuse(config, "scale_attn_by_inverse_layer_idx", {False}, False)
    _refuse(config, "tie_word_embeddings", {True}, True)
    hidden = config["n_embd"]
    return {
        "layers": config["n_layer"],
        "hidden": hidden,
        "heads": config["n_head"],
        "kv_heads": config["n_head"],
        "ffn_hidden": config.get("n_inner") or 4 * hidden,
        "vocab_size": config["vocab_size"],
        "max_positions": config["n_positions"],
        "position": "learned",
        "norm": "layernorm",
        "activation": "gelu",
        "tied_embeddings": True,
        "bias": True,
        "norm_eps": config.get("layer_norm_epsilon", 1e-5),
    }


def _from_llama(config: Mapping[str, Any]) -> dict[str, Any]:
    _refuse(config, "hidden_act", {"silu"}, "silu")
    _refuse(config, "attention_bias", {False}, False)
    _refuse(config, "mlp_bias", {False}, False)
    _refuse(config, "rope_scaling", {None}, None)
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    if config.get("head_dim") not in (None, hidden // heads):
        raise CheckpointError(f"config.json: head_dim {config['head_dim']} is not hidden / heads")
    return {
        "layers": config["num_hidden_layers"],
        "hidden": hidden,
        "heads": heads,
        "kv_heads": config.get("num_key_value_heads") or heads,
        "ffn_hidden": config["intermediate_size"],
        "vocab_size": config["vocab_size"],
        "max_positions": config["max_position_embeddings"],
        "position": "rotary",
        "norm": "rmsnorm",
        "activation": "swiglu",
        "tied_embeddings": bool(config.get("tie_word_embeddings", False)),
        "bias": False,
        "norm_eps": config.get("rms_norm_eps", 1e-6),
        "rope_theta": float(config.get("rope_theta", 10000.0)),
    }


def _refuse(config: Mapping[str, Any], key: str, good: set[Any], default: Any) -> None:
    found = config.get(key, default)
    if isinstance(found, dict | list) or found not in good:
        raise CheckpointError(
            f"config.json: {key} is {found!r}; our transformer has {', '.join(map(repr, good))}"
        )
