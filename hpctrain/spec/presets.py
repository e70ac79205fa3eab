"""Published model shapes by name. Sources stand beside each; dimensions only, no weights."""

from __future__ import annotations

from typing import Any

_GPT2 = {
    "vocab_size": 50257,
    "position": "learned",
    "norm": "layernorm",
    "activation": "gelu",
    "bias": True,
    "tied_embeddings": True,
    "max_positions": 1024,
}
_LLAMA = {
    "position": "rotary",
    "norm": "rmsnorm",
    "activation": "swiglu",
    "bias": False,
    "tied_embeddings": False,
    "norm_eps": 1e-5,
}
_MIXTRAL = {**_LLAMA, "rope_theta": 1e6, "max_positions": 32768}
# Megatron-LM (Narayanan et al. 2021, Korthikanti et al. 2022): GPT blocks, 51,200 padded
# vocabulary, sequences of 2,048, learned positions, output layer tied to the embedding.
_MEGATRON = {**_GPT2, "vocab_size": 51200, "max_positions": 2048}


def _shape(layers: int, hidden: int, heads: int, **more: Any) -> dict[str, Any]:
    return {"layers": layers, "hidden": hidden, "heads": heads, **more}


PRESETS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2-124m": ("GPT-2 small, Radford et al. 2019", _GPT2 | _shape(12, 768, 12)),
    "gpt2-355m": ("GPT-2 medium, Radford et al. 2019", _GPT2 | _shape(24, 1024, 16)),
    "gpt2-774m": ("GPT-2 large, Radford et al. 2019", _GPT2 | _shape(36, 1280, 20)),
    "gpt2-1.5b": ("GPT-2 XL, Radford et al. 2019", _GPT2 | _shape(48, 1600, 25)),
    "llama-1b": (
        "shape of Llama 3.2 1B",
        _LLAMA
        | _shape(16, 2048, 32, kv_heads=8, ffn_hidden=8192, vocab_size=128256)
        | {"tied_embeddings": True, "rope_theta": 500000.0, "max_positions": 8192},
    ),
    "llama-8b": (
        "shape of Llama 3 8B, Grattafiori et al. 2024, table 3",
        _LLAMA
        | _shape(32, 4096, 32, kv_heads=8, ffn_hidden=14336, vocab_size=128256)
        | {"rope_theta": 500000.0, "max_positions": 8192},
    ),
    "llama-70b": (
        "shape of Llama 3 70B, Grattafiori et al. 2024, table 3",
        _LLAMA
        | _shape(80, 8192, 64, kv_heads=8, ffn_hidden=28672, vocab_size=128256)
        | {"rope_theta": 500000.0, "max_positions": 8192},
    ),
    "llama-405b": (
        "shape of Llama 3 405B, Grattafiori et al. 2024, table 3",
        _LLAMA
        | _shape(126, 16384, 128, kv_heads=8, ffn_hidden=53248, vocab_size=128256)
        | {"rope_theta": 500000.0, "max_positions": 8192},
    ),
    "mixtral-8x7b": (
        "shape of Mixtral 8x7B, Jiang et al. 2024, table 1",
        _MIXTRAL
        | _shape(32, 4096, 32, kv_heads=8, ffn_hidden=14336, vocab_size=32000)
        | {"moe": {"experts": 8, "top_k": 2}},
    ),
    "mixtral-8x22b": (
        "shape of Mixtral 8x22B (its released configuration)",
        _MIXTRAL
        | _shape(56, 6144, 48, kv_heads=8, ffn_hidden=16384, vocab_size=32768)
        | {"max_positions": 65536, "moe": {"experts": 8, "top_k": 2}},
    ),
    "deepseek-moe-16b": (
        "shape of DeepSeekMoE 16B, Dai et al. 2024, section 5.1 (its released configuration)",
        _LLAMA
        | _shape(28, 2048, 16, ffn_hidden=10944, vocab_size=102400)
        | {
            "norm_eps": 1e-6,
            "max_positions": 4096,
            "moe": {
                "experts": 64,
                "top_k": 6,
                "hidden": 1408,
                "shared": 2,
                "dense_layers": 1,
                "normalize": False,
                "balance": 0.001,
            },
        },
    ),
    "gpt-22b": ("Korthikanti et al. 2022, table 3", _MEGATRON | _shape(48, 6144, 64)),
    "gpt-175b": ("Brown et al. 2020; Korthikanti et al. 2022", _MEGATRON | _shape(96, 12288, 96)),
    "gpt-530b": ("Korthikanti et al. 2022, table 3", _MEGATRON | _shape(105, 20480, 128)),
    "gpt-1t": ("Narayanan et al. 2021, table 1", _MEGATRON | _shape(128, 25600, 160)),
}
