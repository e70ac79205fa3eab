"""The emulated machine: what is put in comes out, on real ranks and in the simulator."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from hpctrain.cli.prepare import prepare
from hpctrain.errors import SpecError, UsageError
from hpctrain.plan.emulation import emulation_table
from hpctrain.plan.simulated import simulate_step
from hpctrain.plan.steptime import StepModel
from hpctrain.records import read_json
from hpctrain.rundir import RunDir
from hpctrain.scaling.collect import measure
from hpctrain.spec import dump_job, parse_job
from hpctrain.spec.shadow import shadow

HPCTRAIN = str(Path(sys.executable).parent / "hpctrain")
ROOT = Path(__file__).parents[2]
JOB = """
name: emulated
machine: {emulate: frontier}
nodes: 1
ranks_per_node: 2
model: {layers: 4, hidden: 6144, heads: 48, vocab_size: 51200}
parallel: {pipeline: 2}
data: {path: not-read.h5, sequence_length: 2048}
train: {steps: 3, global_batch: 4, micro_batch: 1, precision: bf16}
checkpoint: {every: 100}
"""


def prepared(*overrides: str):
    return prepare(parse_job(JOB, overrides=overrides), Path("/"))


def test_the_machine_is_written_and_read_in_one_form():
    for text, machine in (
        ("{emulate: frontier}", "emulate:frontier"),
        ("{simulate: lumi-g}", "simulate:lumi-g"),
    ):
        spec = parse_job(JOB, overrides=[f"machine={text}"]).spec
        assert spec.machine == machine
        assert spec.emulated
        dumped = dump_job(spec)
        assert yaml.safe_load(dumped)["machine"] == yaml.safe_load(text)
        assert parse_job(dumped).spec == spec
    assert not parse_job(JOB, overrides=["machine=frontier"]).spec.emulated
    for bad in (
        "{emulate: frontier, fast: 1}",
        "{emulate: frontier, simulate: frontier}",
        "{emulate: [1]}",
        "{}",
    ):
        with pytest.raises(SpecError, match="machine"):
            parse_job(JOB, overrides=[f"machine={bad}"])


def test_the_table_holds_the_planners_numbers():
    job = prepared()
    spec = job.job.spec
    table = emulation_table(spec, job.machine)
    from hpctrain.plan.job import strategy_of, workload_of

    model = StepModel(workload_of(spec, job.machine)[0])
    block = model.layer(strategy_of(spec))[0]
    assert sum(table["block"]) == pytest.approx(block.total)  # no tensor parallelism, no recompute
    # A message of the small model takes as long as that of the large one: 2·b·s·h bytes.
    small = shadow(spec)
    bytes_small = 4 * small.data.sequence_length * small.model.hidden
    whole = 2 * 2048 * 6144
    fixed, each = table["near"]
    stands_for = table["messages"][0] * bytes_small
    assert stands_for == pytest.approx(whole)
    assert fixed + each * stands_for == pytest.approx(model.wires.exchange(whole, 2, 1) / 2)


@pytest.mark.parametrize(
    ("sets", "rows"),
    [
        (("parallel.tensor=2", "parallel.pipeline=1"), 2),
        (("parallel.pipeline=1", "parallel.sharding=zero3"), 2),
        (("parallel.pipeline=1", "parallel.context.size=2"), 1),
    ],
)
def test_the_small_model_keeps_layers_cut_and_proportions(sets, rows):
    spec = prepared(*sets).job.spec
    small = shadow(spec)
    assert small.model.layers == 4
    assert small.parallel == spec.parallel
    large, little = spec.model.transformer(), small.model.transformer()
    assert little.parameters < 10_000
    assert small.data.sequence_length % 2 == 0
    assert little.hidden % rows == little.vocab_size % rows == 0  # nothing is padded
    shares = [dims.vocab_size * dims.hidden / dims.layer_parameters for dims in (large, little)]
    assert shares[1] == pytest.approx(shares[0], rel=0.1)


def test_the_simulator_gives_1f1b_its_closed_form():
    job = prepared("train.global_batch=8", "parallel.pipeline=2")
    found = simulate_step(job.job.spec, job.machine)
    pipe = StepModel(found.plan.work).pipe(found.plan.strategy)
    block = pipe.block.total
    # two stages of two blocks; 1F1B waits (p-1)·(F+B) = one stage's micro-batch, and ends differ
    # by head and embedding, so that the makespan lies between these two.
    stage = 2 * block
    slow = stage + pipe.head
    assert 9 * stage < found.seconds - found.update - found.data < 9 * slow + 16 * 1e-2
    told = found.compute + found.pipeline + found.data + sum(found.talk.values())
    assert told == pytest.approx(found.seconds)
    big = prepared("nodes=1250", "ranks_per_node=8", "parallel.pipeline=4",
                   "train.global_batch=10000")  # fmt: skip
    assert simulate_step(big.job.spec, big.machine).seconds > 0  # 10,000 devices


EXPERTS = (
    "machine={simulate: frontier}",
    "model.moe={experts: 16, top_k: 2, hidden: 3072, dense_layers: 1}",
    "parallel.pipeline=1", "nodes=2", "ranks_per_node=8", "train.global_batch=32",
)  # fmt: skip


@pytest.mark.parametrize("nodes", [2, 1250])
def test_experts_are_simulated(nodes):
    """Without a pipeline a step is its blocks one after another: a dense one, three of experts."""
    job = prepared(
        *EXPERTS, "parallel.expert=8", f"nodes={nodes}", f"train.global_batch={16 * nodes}"
    )
    found = simulate_step(job.job.spec, job.machine)
    model = StepModel(found.plan.work)
    block, dense, head, embedding = model.layer(found.plan.strategy)
    passes = [dense, block, block, block]
    micro = found.plan.step.micro_batches
    compute = sum(b.total - b.forward.communication - b.backward.communication for b in passes)
    assert found.compute - found.update == pytest.approx(micro * (compute + head + embedding))
    assert found.talk["ep"] == pytest.approx(micro * 3 * (block.forward.ep + block.backward.ep))
    assert found.talk["ep"] > 0 == found.talk["tp"] == found.talk["cp"]
    told = found.compute + found.data + sum(found.talk.values())
    assert told == pytest.approx(found.seconds)
    # Nothing hides the sums of experts. The planner hides all but a little of the others, the
    # simulator all but the last of eight buckets.
    assert found.plan.step.seconds < found.seconds < 1.04 * found.plan.step.seconds


def test_experts_in_a_simulated_pipeline():
    job = prepared(*EXPERTS, "parallel.expert=4", "parallel.pipeline=2")
    found = simulate_step(job.job.spec, job.machine)
    told = found.compute + found.pipeline + found.data + sum(found.talk.values())
    assert told == pytest.approx(found.seconds)
    # The second stage has two blocks of experts and the head, the first one block of each kind.
    assert found.seconds == pytest.approx(found.plan.step.seconds, rel=0.1)


def submit(folder: Path, *sets: str, code: int = 0) -> RunDir | None:
    (folder / "job.yaml").write_text(JOB)
    extra = [token for one in sets for token in ("--set", one)]
    done = subprocess.run(
        [HPCTRAIN, "submit", "job.yaml", *extra], cwd=folder, capture_output=True, text=True,
        timeout=170, env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return RunDir.all(folder / "runs")[-1] if code == 0 else None


def test_ranks_take_the_time_that_was_put_in(tmp_path):
    """A pipeline of two ranks: 1F1B's closed form, whatever else this machine does meanwhile."""
    run = submit(tmp_path)
    found = measure(run)
    table = read_json(run.emulation)
    stage, head = 2 * sum(table["block"]), table["head"]
    # Four micro-batches through the slower last stage, one through the first before and after,
    # two messages on the way, the tied embedding's sum, the optimizer.
    fixed, each = table["near"]
    message = fixed + each * table["messages"][0] * 4 * 4 * shadow(prepared().job.spec).model.hidden
    pipeline = 4 * (stage + head) + stage + table["embedding"] + 2 * message
    expected = pipeline + table["tied"] + table["optimizer"] + table["step"]
    assert found.step_seconds == pytest.approx(expected, rel=1e-4)
    mine = 4 * (stage + table["embedding"]) + table["optimizer"] + table["step"]
    assert found.split["compute"] == pytest.approx(mine)
    assert found.split["pipeline"] == pytest.approx(expected - mine, rel=1e-3)
    assert found.hardware["emulated"] == "frontier"
    assert found.steps[-1].tokens == 3 * 4 * 2048
    assert (run.checkpoints / "step00000003").is_dir()  # the real checkpoint code ran
    # It really slept: the time between the first step's record and the last one's.
    times = [record.time for record in found.steps]
    assert times[-1] - times[0] > expected


MOE = (
    "ranks_per_node=4",
    "model.hidden=4096",
    "model.heads=32",
    "model.moe={experts: 16, top_k: 2, hidden: 2048, dense_layers: 1}",
)
FOUR = ("ranks_per_node=4", "train.global_batch=8")
CUTS = {
    "zero bubble": (*FOUR, "parallel.pipeline=4", "parallel.schedule=zb-h1"),
    "V": (*FOUR, "parallel.pipeline=2", "parallel.schedule=zb-v", "parallel.sharding=zero1"),
    "two nodes": ("nodes=2", "train.global_batch=8", "parallel.schedule=interleaved"),
    "recomputed": ("parallel.recompute=full",),
    "tensor": ("parallel.pipeline=1", "parallel.tensor=2"),
    "tensor and pipeline": (*FOUR, "parallel.tensor=2"),
    "context": ("parallel.pipeline=1", "parallel.context.size=2"),
    "replicas": ("parallel.pipeline=1",),
    "zero1": (*FOUR, "parallel.pipeline=1", "parallel.sharding=zero1"),
    "zero2": (*FOUR, "parallel.pipeline=1", "parallel.sharding=zero2"),
    "zero3": ("parallel.pipeline=1", "parallel.sharding=zero3", "train.global_batch=2"),
    "hybrid": (*FOUR, "parallel.pipeline=1", "parallel.sharding=zero3", "parallel.shard=2"),
    "sharded pipeline": (*FOUR, "parallel.sharding=zero3"),
    "experts": (*MOE, "parallel.expert=2", "parallel.pipeline=1", "train.global_batch=8"),
    "sharded experts": (
        *MOE,
        "parallel.expert=2",
        "parallel.pipeline=1",
        "parallel.sharding=zero3",
    ),
    "experts, tensor and pipeline": (*MOE, "parallel.expert=2", "parallel.tensor=2"),
}


@pytest.mark.parametrize("cut", CUTS)
def test_ranks_and_simulator_agree(tmp_path, cut):
    """Two ways to the same step: real ranks with real messages, and events of a table."""
    found = measure(submit(tmp_path, *CUTS[cut]))
    job = prepared(*CUTS[cut])
    expected = simulate_step(job.job.spec, job.machine)
    assert found.step_seconds == pytest.approx(expected.seconds, rel=0.03)
    assert found.split["compute"] == pytest.approx(expected.compute, rel=1e-3)


def test_many_devices_are_simulated_and_reported(tmp_path):
    run = submit(tmp_path, "nodes=64", "ranks_per_node=8", "train.global_batch=1024")
    found = measure(run)
    assert found.hardware["simulated"]
    assert found.world_size == 512
    job = prepared("nodes=64", "ranks_per_node=8", "train.global_batch=1024")
    assert found.step_seconds == pytest.approx(simulate_step(job.job.spec, job.machine).seconds)
    submit(tmp_path, "nodes=1251", "ranks_per_node=8", "train.global_batch=10008", code=3)


def test_a_simulated_model_of_experts_is_a_run(tmp_path):
    found = measure(submit(tmp_path, *EXPERTS, "parallel.expert=8"))
    assert found.split["experts"] > 0
    assert "tensor" not in found.split


def test_a_model_of_ones_own_has_no_times(tmp_path):
    job = parse_job(
        "machine: {emulate: frontier}\nmodel: {module: m:f}\ndata: {module: m:g}\n"
        "train: {steps: 1, global_batch: 8}\n"
    )
    with pytest.raises(UsageError, match=r"model\.module m:f is not known"):
        prepare(job, tmp_path)
    for dispatch, found in (("hierarchical", "hierarchical"), ("{copies: 2}", "copies: 2")):
        sets = (*MOE, "parallel.expert=2", f"parallel.dispatch={dispatch}")
        with pytest.raises(UsageError, match=f"parallel.dispatch: {found}.*no emulated times"):
            prepared(*sets)
        prepared(*sets, "machine={simulate: frontier}")
