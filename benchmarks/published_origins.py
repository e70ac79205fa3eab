"""What is known of the software, the network and the conventions behind each source of rows."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Origin:
    """What is known of the software and the network behind the rows of one source.

    Attributes:
        pattern: regular expression on source, model and notes.
        stack: software stack.
        flops: convention of stated TFLOP/s and MFU: ``model``, ``hardware`` or ``causal``.
        nic: bytes/s one way into a node; the accelerator's usual where None.
        attention: kernel where the rows do not state it.
        gradients: bytes of a gradient element; the stack's where None.
        logit_bytes, parallel_loss: as in Stack; the stack's where None.
    """

    pattern: str
    stack: str
    flops: str = "model"
    nic: float | None = None
    attention: str | None = None
    gradients: int | None = None
    logit_bytes: float | None = None
    parallel_loss: bool | None = None


ORIGINS = (
    Origin(r"Megatron-Bridge", "megatron-core-2024", "causal"),
    Origin(r"dgxc|NeMo", "megatron-core-2024", gradients=2),
    Origin(r"MoE-ModelZoo|Transformer Engine", "megatron-core-2024"),
    Origin(r"PTD-P|Narayanan", "megatron-2021", "hardware"),
    Origin(r"Korthikanti|selective activation", "megatron-2021"),
    Origin(r"Megatron-LM repo 2020|gpt scaling", "megatron-2020", "hardware"),
    Origin(r"vTrain", "megatron-2021", nic=100e9),
    Origin(r"MT-NLG|Megatron-Turing", "megatron-deepspeed-2021", "hardware"),
    Origin(r"bigscience|BLOOM", "megatron-deepspeed-2021", "hardware", 50e9),
    Origin(r"OneFlow\]", "oneflow-2021", "hardware", 12.5e9),
    Origin(r"DLPerf", "megatron-2020", "hardware", 12.5e9),
    Origin(
        r"Hagemann", "pytorch-2023", nic=25e9, attention="flash2", gradients=2,
        logit_bytes=14.0, parallel_loss=False,
    ),
    Origin(r"llm-foundry|MosaicML", "pytorch-2023", logit_bytes=4.0),
    Origin(r"InternEvo|InternLM", "pytorch-2023", "hardware", attention="flash2"),
    Origin(r"nanotron|torchtitan|TorchTitan|SimpleFSDP", "pytorch-2024"),
    Origin(r"Frontier|ORNL|LUMI", "pytorch-2023", "hardware", 100e9, "flash2"),
    Origin(
        r"Megatron-LM.*(README|examples/(llama|gpt))|Megatron-Core|Megatron Core",
        "megatron-core-2024",
    ),
    Origin(r"Primus|ROCm|rocm", "megatron-core-2024"),
)  # fmt: skip


def origin_of(raw: dict[str, str]) -> Origin:
    """The origin whose pattern the row's source matches, else a guess from hardware and type."""
    text = f"{raw.get('source', '')} {raw.get('model', '')}"
    for origin in ORIGINS:
        if re.search(origin.pattern, text, re.IGNORECASE):
            return origin
    name = raw.get("gpu", "")
    states = raw.get("zero_stage_or_fsdp", "")
    old = raw.get("dtype") == "fp16"
    told = _convention(raw.get("notes", ""))
    if re.search("v100", name, re.IGNORECASE):
        return Origin("", "megatron-2020", told or "hardware")
    if re.search("a[18]00", name, re.IGNORECASE):
        stack = "megatron-2021" if old else "pytorch-2023"
        return Origin("", stack, told or "model", attention=None if old else "flash2")
    if re.search("mi2|frontier|lumi", name, re.IGNORECASE):
        return Origin("", "pytorch-2023", told or "model", attention="flash2")
    if re.search("fsdp|zero", states, re.IGNORECASE) or states in ("2", "3"):
        return Origin("", "pytorch-2024", told or "model")
    return Origin("", "megatron-core-2024", told or "model")


def _convention(notes: str) -> str | None:
    """The FLOP convention that a row's notes state."""
    if re.search(r"causal attention|attention (counted )?(at )?half|\(causal\)", notes):
        return "causal"
    if re.search(r"\bHW FLOP|hardware FLOP|recompute counted|96[- ]formula", notes, re.IGNORECASE):
        return "hardware"
    return "model" if re.search(r"model[ -](FLOP|TFLOP)", notes, re.IGNORECASE) else None
