"""To other programs and back: every bit returns, and what is exported computes the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from checkpoint_rank_programs import numbers, whole
from click.testing import CliRunner, Result
from safetensors.torch import load_file, save_file

from hpctrain.cli import main
from hpctrain.io.checkpoint import CheckpointStore
from hpctrain.io.comm import SoloCommunicator
from hpctrain.io.compare import differences
from hpctrain.model.transformer import Transformer
from hpctrain.testing import parity

GPT2 = """\
data: {path: none, sequence_length: 16}
train: {steps: 1, global_batch: 1}
model: {layers: 2, hidden: 12, heads: 3, vocab_size: 40, max_positions: 16, ffn_hidden: 20}
"""
LLAMA = """\
data: {path: none, sequence_length: 16}
train: {steps: 1, global_batch: 1}
model: {layers: 2, hidden: 16, heads: 4, kv_heads: 2, vocab_size: 40, max_positions: 16,
  ffn_hidden: 24, position: rotary, norm: rmsnorm, activation: swiglu, bias: false,
  tied_embeddings: false}
"""


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["checkpoint", *map(str, arguments)])


def done(*arguments: object) -> str:
    result = invoke(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def checkpoint_of(text: str, root: Path) -> tuple[Transformer, CheckpointStore]:
    """A model with numbers of its own, its optimizer's states and scalars, as a checkpoint."""
    spec = parity._spec(text, 1, []).model
    generator = torch.Generator().manual_seed(5)
    model = Transformer(spec.transformer())
    shards = []
    for name, parameter in model.named_parameters():
        with torch.no_grad():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
        array = parameter.detach().numpy()
        shards += [whole(f"model/{name}", array), whole(f"optimizer/exp_avg/{name}", array**2)]
        shards.append(whole(f"optimizer/step/{name}", np.array(7, np.float32)))
    store = CheckpointStore(root, SoloCommunicator())
    scalars = {"tokens": 11, "samples": 3, "model": spec.model_dump(mode="json")}
    store.save(7, shards, scalars=scalars, per_rank={"torch": np.arange(9, dtype=np.uint8)})
    return model, store


def assert_equal(one: CheckpointStore, other: Path, *, but: tuple[str, ...] = ()) -> None:
    there = CheckpointStore(other, SoloCommunicator())
    (step,) = there.steps()
    with one.open(7) as a, there.open(step) as b:
        assert [d for d in differences(a, b) if not d.name.startswith(but or ("none",))] == []


def test_safetensors_and_back(tmp_path: Path) -> None:
    model, store = checkpoint_of(GPT2, tmp_path / "here")
    done("export", tmp_path / "here", tmp_path / "out", "--format", "safetensors")
    loaded = load_file(tmp_path / "out" / "model.safetensors")
    for name, parameter in model.named_parameters():
        assert torch.equal(loaded[f"model/{name}"], parameter)
    assert torch.equal(
        loaded["optimizer/exp_avg/norm.weight"], model.get_parameter("norm.weight") ** 2
    )
    done("import", tmp_path / "out", tmp_path / "back")
    assert_equal(store, tmp_path / "back")
    with CheckpointStore(tmp_path / "back", SoloCommunicator()).open(7) as reader:
        state = reader.rank_state(0)
        assert state is not None and state["torch"].tolist() == list(range(9))
    weights = tmp_path / "weights"
    done("export", tmp_path / "here", weights, "--format", "safetensors", "--weights-only")
    assert {n.split("/")[0] for n in load_file(weights / "model.safetensors")} <= {
        "model",
        "hpctrain",
    }


@pytest.mark.parametrize("experts", ["", ", moe: {experts: 4, top_k: 2, router: sigmoid}"])
def test_the_model_section_told_makes_the_same_model(tmp_path: Path, experts: str) -> None:
    text = LLAMA.replace("bias: false", f"bias: false{experts}")
    checkpoint_of(text, tmp_path / "here")
    done("export", tmp_path / "here", tmp_path / "out", "--format", "safetensors")
    told = done("import", tmp_path / "out", tmp_path / "back")
    assert ("moe" in told) == bool(experts)
    assert "None" not in told and "null" not in told
    again = text[: text.index("model:")] + told
    assert parity._spec(again, 1, []).model == parity._spec(text, 1, []).model


def test_types_that_numpy_has_not(tmp_path: Path) -> None:
    """bfloat16 and 8-bit floats, made by torch, compared by torch."""
    made = {
        "half": torch.randn(5, 3).bfloat16(),
        "eighth": torch.randn(300).to(torch.float8_e4m3fn),
        "other": torch.randn(300).to(torch.float8_e5m2),
        "flags": torch.tensor([True, False]),
        "count": torch.tensor(2**40 + 1),
    }
    raw = {"half": torch.int16, "eighth": torch.uint8, "other": torch.uint8}
    shards = [
        whole(
            f"model/{name}",
            t.view(raw.get(name, t.dtype)).numpy().view(np.uint16 if name == "half" else None)
            if name == "half"
            else t.view(raw.get(name, t.dtype)).numpy(),
            str(t.dtype).removeprefix("torch."),
        )
        for name, t in made.items()
    ]
    store = CheckpointStore(tmp_path / "here", SoloCommunicator())
    store.save(7, shards, scalars={"tokens": 1}, per_rank={})

    def same(found: dict[str, torch.Tensor], prefix: str) -> None:
        for name, right in made.items():
            tensor = found[prefix + name]
            assert tensor.dtype == right.dtype
            kind = raw.get(name, right.dtype)
            assert torch.equal(tensor.view(kind), right.view(kind)), name

    done("export", tmp_path / "here", tmp_path / "safe", "--format", "safetensors")
    same(load_file(tmp_path / "safe" / "model.safetensors"), "model/")
    done("import", tmp_path / "safe", tmp_path / "back")
    assert_equal(store, tmp_path / "back")
    done("export", tmp_path / "here", tmp_path / "dcp", "--format", "dcp")
    state = {f"model.{name}": torch.empty_like(t) for name, t in made.items()}
    dcp.load(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    same(state, "model.")
    done("import", tmp_path / "dcp", tmp_path / "again")
    assert_equal(store, tmp_path / "again")


def test_torchs_distributed_checkpoints_both_ways(tmp_path: Path) -> None:
    model, store = checkpoint_of(LLAMA, tmp_path / "here")
    done("export", tmp_path / "here", tmp_path / "out", "--format", "dcp")
    key = "optimizer.state.layers.1.ffn.gate.weight.exp_avg"
    state = {
        "model.layers.1.ffn.gate.weight": torch.zeros(24, 16),
        key: torch.zeros(24, 16),
    }
    dcp.load(state, checkpoint_id=tmp_path / "out", no_dist=True)
    weight = model.get_parameter("layers.1.ffn.gate.weight")
    assert torch.equal(state["model.layers.1.ffn.gate.weight"], weight)
    assert torch.equal(state[key], weight**2)
    done("import", tmp_path / "out", tmp_path / "back")
    assert_equal(store, tmp_path / "back")
    result = invoke("export", tmp_path / "here", tmp_path / "out", "--format", "dcp")
    assert result.exit_code == 5
    assert "is there already" in result.stderr
    # What another program wrote, whose names are its own, and something that is no tensor.
    theirs = {"blocks.0.w": torch.ones(2, 3), "epoch": "three"}
    dcp.save(theirs, checkpoint_id=tmp_path / "theirs", no_dist=True)
    result = invoke("import", tmp_path / "theirs", tmp_path / "ours", "--step", 4)
    assert result.exit_code == 0
    assert "left out, for they are no tensors: epoch" in result.stderr
    with h5py.File(tmp_path / "ours" / "step00000004" / "tensors.h5") as file:
        assert file["model/blocks.0.w"][...].tolist() == [[1, 1, 1], [1, 1, 1]]


def test_one_plain_file(tmp_path: Path) -> None:
    _, store = checkpoint_of(GPT2, tmp_path / "here")
    done("export", tmp_path / "here", tmp_path / "out", "--format", "hdf5")
    assert_equal(store, tmp_path / "out")
    with h5py.File(tmp_path / "out" / "step00000007" / "tensors.h5") as file:
        assert not file["model/norm.weight"].is_virtual


TOKENS = torch.tensor([[3, 1, 4, 15, 9, 26, 5, 35]])


@torch.no_grad()
def gpt2(w: dict[str, torch.Tensor], config: dict[str, Any]) -> torch.Tensor:
    """GPT-2 as published (Radford 2019; Conv1D weights stand transposed), written out."""
    heads, eps = config["n_head"], config["layer_norm_epsilon"]
    at = "transformer."

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"], eps)

    def conv(x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ w[f"{name}.weight"] + w[f"{name}.bias"]

    x = w[at + "wte.weight"][TOKENS] + w[at + "wpe.weight"][: TOKENS.shape[1]]
    for n in range(config["n_layer"]):
        h = f"{at}h.{n}."
        parts = conv(norm(x, h + "ln_1"), h + "attn.c_attn").chunk(3, -1)
        q, k, v = (p.unflatten(-1, (heads, -1)).transpose(1, 2) for p in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + conv(y, h + "attn.c_proj")
        y = F.gelu(conv(norm(x, h + "ln_2"), h + "mlp.c_fc"), approximate="tanh")
        x = x + conv(y, h + "mlp.c_proj")
    return norm(x, at + "ln_f") @ w[at + "wte.weight"].T


@torch.no_grad()
def llama(w: dict[str, torch.Tensor], config: dict[str, Any]) -> torch.Tensor:
    """Llama as published (Touvron 2023), with rotary halves as Hugging Face stores them."""
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    size = config["hidden_size"] // heads
    rates = config["rope_theta"] ** (-torch.arange(0, size, 2) / size)
    angles = torch.arange(TOKENS.shape[1])[:, None] * torch.cat([rates, rates])

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], w[f"{name}.weight"], config["rms_norm_eps"])

    def turn(x: torch.Tensor) -> torch.Tensor:
        one, two = x.chunk(2, -1)
        return x * angles.cos() + torch.cat([-two, one], -1) * angles.sin()

    x = w["model.embed_tokens.weight"][TOKENS]
    for n in range(config["num_hidden_layers"]):
        at = f"model.layers.{n}."
        y = norm(x, at + "input_layernorm")
        q, k, v = (
            (y @ w[f"{at}self_attn.{p}_proj.weight"].T).unflatten(-1, (-1, size)).transpose(1, 2)
            for p in "qkv"
        )
        k, v = (t.repeat_interleave(heads // groups, 1) for t in (turn(k), v))
        y = F.scaled_dot_product_attention(turn(q), k, v, is_causal=True)
        x = x + y.transpose(1, 2).flatten(2) @ w[at + "self_attn.o_proj.weight"].T
        y = norm(x, at + "post_attention_layernorm")
        gate, up = (y @ w[f"{at}mlp.{p}_proj.weight"].T for p in ("gate", "up"))
        x = x + (F.silu(gate) * up) @ w[at + "mlp.down_proj.weight"].T
    return norm(x, "model.norm") @ w["lm_head.weight"].T


@pytest.mark.parametrize(("text", "reference"), [(GPT2, gpt2), (LLAMA, llama)])
def test_hugging_faces_layout_computes_the_same_and_returns(
    tmp_path: Path, text: str, reference: Any
) -> None:
    model, store = checkpoint_of(text, tmp_path / "here")
    done("export", tmp_path / "here", tmp_path / "out", "--format", "hf")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    weights = load_file(tmp_path / "out" / "model.safetensors")
    model.eval()
    with torch.no_grad():
        expected = model(TOKENS, None)
    assert expected.std() > 0.1
    torch.testing.assert_close(reference(weights, config), expected, atol=1e-5, rtol=1e-5)
    told = done("import", tmp_path / "out", tmp_path / "back")
    same = parity._spec(text[: text.index("model:")] + told, 1, []).model.transformer()
    assert same == parity._spec(text, 1, []).model.transformer()
    assert_equal(store, tmp_path / "back", but=("optimizer/", "scalar "))
    # Rounded once, as torch rounds.
    done("export", tmp_path / "here", tmp_path / "bf16", "--format", "hf", "--dtype", "bfloat16")
    for name, tensor in load_file(tmp_path / "bf16" / "model.safetensors").items():
        assert torch.equal(tensor, weights[name].bfloat16())


def test_what_cannot_be_converted_is_said(tmp_path: Path) -> None:
    checkpoint_of(LLAMA.replace("norm: rmsnorm", "norm: layernorm"), tmp_path / "here")
    result = invoke("export", tmp_path / "here", tmp_path / "out", "--format", "hf")
    assert result.exit_code == 5
    assert "neither a GPT-2 nor a Llama" in result.stderr
    save_file({"w": torch.zeros(3)}, tmp_path / "w.safetensors")
    result = invoke("import", tmp_path / "w.safetensors", tmp_path / "ours")
    assert result.exit_code == 5
    assert "config.json: cannot be read" in result.stderr
    assert invoke("import", tmp_path / "none", tmp_path / "ours").exit_code == 2


def test_diff_says_what_and_by_how_much(tmp_path: Path) -> None:
    for name, value in (("a", 1.0), ("b", 1.5)):
        array = numbers([4, 5])
        array[2, 3] = value
        store = CheckpointStore(tmp_path / name, SoloCommunicator())
        shards = [whole("model/w", array), whole("model/same", numbers([3]))]
        store.save(1, shards, scalars={"lr": value}, per_rank={})
    result = invoke("diff", tmp_path / "a", tmp_path / "b")
    assert result.exit_code == 5
    assert (
        result.stdout
        == "model/w: 1 of 20 elements differ, by 0.5 at most\nscalar lr: 1.0 and 1.5\n"
    )
    assert done("diff", tmp_path / "a", tmp_path / "a") == "all 2 tensors are equal\n"


def test_ls_inspect_verify_and_prune(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, SoloCommunicator(), keep=9)
    for step in (1, 2, 3, 4):
        shards = [whole("model/w", numbers([40, 30], step))]
        store.save(step, shards, scalars={"tokens": 100 * step}, per_rank={})
    rows = json.loads(done("ls", tmp_path, "--json"))["checkpoints"]
    assert [(row["step"], row["tokens"], row["state"]) for row in rows] == [
        (4, 400, "ok"), (3, 300, "ok"), (2, 200, "ok"), (1, 100, "ok"),
    ]  # fmt: skip
    told = json.loads(done("inspect", tmp_path, "--step", "2", "--tensors", "*", "--json"))
    assert told["groups"]["model"] == {"tensors": 1, "elements": 1200, "bytes": 4800}
    assert told["tensors"][0]["shape"] == [40, 30]
    with store.open(3) as reader:
        start = reader.manifest.tensors["model/w"].extents[0].start
    with (tmp_path / "step00000003" / "tensors.h5").open("r+b") as stream:
        stream.seek(start + 17)
        stream.write(b"\xff")
    assert done("verify", tmp_path, "--all").count("whole") == 4  # without reading the numbers
    result = invoke("verify", tmp_path, "--all", "--deep")
    assert result.exit_code == 5
    assert f"extent model/w[0:40, 0:30] at byte {start}: checksum" in result.stdout
    # The headers of step 2 go: it no longer counts as kept.
    with (tmp_path / "step00000002" / "tensors.h5").open("r+b") as stream:
        stream.write(b"\0" * 8)
    assert "would remove step 2 (damaged" in done("prune", tmp_path, "--keep", "3", "--dry-run")
    assert store.steps() == [1, 2, 3, 4]
    assert "kept step 4, 3, 1" in done("prune", tmp_path, "--keep", "3")
    assert store.steps() == [1, 3, 4]
