"""``hpctrain plan`` and ``hpctrain calibrate`` as people run them."""

from __future__ import annotations

import html.parser
import json

import pytest
import yaml
from click.testing import CliRunner

from hpctrain.cli import main
from hpctrain.cli.plan import command as plan_command
from hpctrain.errors import Exit

JOB = """\
name: big
machine: dgx-a100
nodes: 8
model: {preset: llama-8b}
data: {path: x.h5, sequence_length: 8192}
train: {steps: 10000, global_batch: 512, micro_batch: 1, precision: bf16}
parallel: {tensor: 4, sharding: zero3}
"""


@pytest.fixture
def job(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text(JOB)
    return "job.yaml"


def run(*args: str, code: int = 0) -> str:
    """The command through the real entry point; what it printed."""
    result = CliRunner().invoke(main, ["plan", *args])
    assert result.exit_code == code, result.output
    return result.output


def data(*args: str, code: int = 0) -> dict:
    return json.loads(run(*args, "--json", code=code))


def test_a_plan_says_everything(job):
    text = run(job)
    for word in (
        "llama-8b of 8.03B parameters on 8 nodes of dgx-a100, 64 ranks",
        "to spare",
        "nine in ten between",
        "MFU",
        "node-hours",
        "checkpoint",
        "numbers",
        "dp_shard",
        "memory of a rank",
        "time of a step",
        "better, of",
        "parallel.tensor=",
    ):
        assert word in text, word


def test_json_holds_together(job):
    found = data(job)
    step = found["step"]
    assert sum(step["split"].values()) == pytest.approx(step["seconds"])
    assert step["low"] < step["seconds"] < step["high"]
    stages = found["memory"]["stages"]
    assert max(sum(s.values()) for s in stages) == pytest.approx(found["memory"]["used"])
    tokens = 512 * 8192 / step["seconds"]
    assert found["tokens_per_second"] == pytest.approx(tokens)
    # 8.03B parameters: 6 FLOPs a weight and 12·32·4096·8192 of attention a token
    per_token = 6 * (8_030_261_248 - 128256 * 4096 - 65 * 4096) + 12 * 32 * 4096 * 8192
    assert found["model_flops"] == pytest.approx(tokens * per_token / 64)
    assert found["mfu"] == pytest.approx(found["model_flops"] / 312e12)
    assert found["run"]["hours"] == pytest.approx(step["seconds"] * 10000 / 3600)
    assert found["run"]["node_hours"] == pytest.approx(8 * found["run"]["hours"])
    assert found["run"]["checkpoint_bytes"] == 12 * 8_030_261_248
    seconds = [a["seconds"] for a in found["alternatives"]]
    assert len(seconds) == 3 and seconds == sorted(seconds) and seconds[0] < step["seconds"]


def test_alternatives_are_as_good_as_they_say(job):
    best = data(job)["alternatives"][0]
    overrides = []
    for key, value in best["settings"].items():
        overrides += ["--set", f"{key}={str(value).lower()}"]
    again = data(job, *overrides)
    assert again["step"]["seconds"] == pytest.approx(best["seconds"])
    assert again["memory"]["used"] == pytest.approx(best["memory"])


def test_young_daly_interval(job):
    """sqrt(2·δ·M): 96.4 GB at 8 GB/s, and a failure in 250 days of 8 nodes."""
    found = data(job)["run"]
    write = 12 * 8_030_261_248 / 8e9
    assert found["checkpoint_seconds"] == pytest.approx(write)
    mtbf = 250 * 86400 / 8
    assert found["interval_seconds"] == pytest.approx((2 * write * mtbf) ** 0.5)
    # two checkpoints in flight lie in the memory of eight nodes
    assert found["staging_bytes"] == pytest.approx(2 * 12 * 8_030_261_248 / 8)
    stated = data(job, "--set", "checkpoint.mtbf=6h", "--no-search")["run"]
    assert stated["interval_seconds"] == pytest.approx((2 * write * 6 * 3600) ** 0.5)


def test_what_does_not_fit_leaves_with_3(job):
    args = (job, "--set", "parallel.sharding=none", "--set", "parallel.tensor=1")
    text = run(*args, code=Exit.IMPOSSIBLE)
    assert "does not fit" in text and "too much" in text
    found = data(*args, code=Exit.IMPOSSIBLE)
    assert found["fits"] is False
    assert all(a["memory"] <= found["memory"]["limit"] for a in found["alternatives"])
    assert "it fits" in found["alternatives"][0]["why"]


@pytest.mark.parametrize(
    ("overrides", "code", "words"),
    [
        (["parallel.tensor=5"], Exit.IMPOSSIBLE, ["tensor 5", "64 ranks", "nearest", "tensor 4"]),
        (["train.global_batch=500"], Exit.IMPOSSIBLE, ["500", "16", "496 or 512"]),
        (["machine=frontierr"], Exit.IMPOSSIBLE, ["frontierr", "mean frontier?", "dgx-a100"]),
        (["model.layers=0"], Exit.USAGE, ["layers"]),
    ],
)
def test_impossible_jobs_name_the_rule_and_the_nearest(job, overrides, code, words):
    args = [a for o in overrides for a in ("--set", o)]
    result = CliRunner(**_separate()).invoke(main, ["plan", job, *args])
    assert result.exit_code == code
    for word in words:
        assert word in result.stderr, (word, result.stderr)


def _separate():
    import inspect

    parameters = inspect.signature(CliRunner.__init__).parameters
    return {"mix_stderr": False} if "mix_stderr" in parameters else {}


def test_unknown_stack_lists_the_known(job):
    result = CliRunner(**_separate()).invoke(main, ["plan", job, "--stack", "fortran"])
    assert result.exit_code == Exit.IMPOSSIBLE
    assert "hpctrain" in result.stderr and "megatron-core-2024" in result.stderr


def test_every_number_is_explained(job):
    text = run(job, "--explain")
    for name in ("parameters: 8.03B", "memory of activations", "time: matrix products", "step:"):
        assert name in text
    assert "[machine file]" in text and "[job file]" in text
    explained = data(job, "--explain")["explained"]
    assert all(one["formula"] and one["inputs"] for one in explained)
    # every kind of work that takes a hundredth of the step has its line
    split = data(job)["step"]
    named = {one["name"] for one in explained}
    for kind, seconds in split["split"].items():
        if seconds > 0:
            assert f"time: {kind}" in named
    (stage,) = data(job)["memory"]["stages"]
    for part, size in stage.items():
        if size:
            part = "optimizer states" if part == "optimizer" else part
            assert f"memory of {part}" in named
    assert {"speed", "MFU", "run", "checkpoint", "memory that can be filled"} <= named


class Checker(html.parser.HTMLParser):
    def __init__(self):
        super().__init__()
        self.open: list[str] = []
        self.tags: dict[str, int] = {}

    def handle_starttag(self, tag, attrs):
        self.tags[tag] = self.tags.get(tag, 0) + 1
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags[tag] = self.tags.get(tag, 0) + 1

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_a_page_with_charts(job, tmp_path):
    run(
        job, "--html", "plan.html", "--set", "parallel.pipeline=4", "--set", "parallel.tensor=2",
        "--set", "parallel.sharding=none", "--set", "name=<script>",
    )  # fmt: skip
    page = (tmp_path / "plan.html").read_text()
    checker = Checker()
    checker.feed(page)
    assert checker.open == []
    assert checker.tags["svg"] == 3, "stage memory, time split, pipeline time line"
    assert "<script>" not in page and "&lt;script&gt;" in page
    assert page.count(">stage ") >= 4
    assert "http" not in page.replace("http://www.w3.org/2000/svg", ""), "needs no other file"


def test_pipelines_are_run_through_their_own_table(job):
    args = ["--set", "parallel.pipeline=4", "--set", "parallel.sharding=none"]
    text = run(job, *args, "--set", "parallel.tensor=4")
    assert "its table of actions takes" in text
    assert "stage 0, the fullest" in text
    found = data(job, *args, "--set", "parallel.tensor=4")
    assert len(found["memory"]["stages"]) == 4
    assert any("idle" in w["text"] for w in found["warnings"]) or (
        found["step"]["split"]["pipeline bubble"] < 0.2 * found["step"]["seconds"]
    )


def test_warnings_with_remedies(job):
    """A vocabulary of 50,257 and tensor parallelism over nodes of four devices."""
    found = data(
        job, "--set", "machine=perlmutter", "--set", "parallel.tensor=8",
        "--set", "model.preset=gpt2-1.5b", "--set", "data.sequence_length=1024",
        "--set", "model.heads=32", code=0,
    )  # fmt: skip
    texts = {w["text"]: w["remedy"] for w in found["warnings"]}
    vocabulary = next(t for t in texts if "50257" in t)
    assert texts[vocabulary] == "pad it to 50688"
    assert 50688 % (8 * 64) == 0
    crossing = next(t for t in texts if "crosses nodes" in t)
    assert "tensor 4" in texts[crossing]
    assert all(texts.values())


def test_warnings_of_pipelines(job):
    """Seven micro-batches on eight stages idle 7/14 of the time; the last holds 128k logits."""
    found = data(
        job, "--set", "parallel={tensor: 8, pipeline: 8}", "--set", "train.global_batch=7",
        "--no-search",
    )  # fmt: skip
    texts = {w["text"]: w["remedy"] for w in found["warnings"]}
    idle = next(t for t in texts if "the pipeline idles" in t)
    assert "interleaved" in texts[idle] and "fewer than 8 stages" in texts[idle]
    uneven = next(t for t in texts if "longer than the others" in t)
    assert "stage 7" in uneven and "output layer" in uneven
    assert "fewer blocks" in texts[uneven]


def test_two_jobs_beside_each_other(job, tmp_path):
    (tmp_path / "other.yaml").write_text(JOB.replace("tensor: 4", "tensor: 2"))
    text = run(job, "--compare", "other.yaml")
    assert "job.yaml" in text and "other.yaml" in text
    assert "tp4 dp_shard16" in text and "tp2 dp_shard32" in text
    found = data(job, "--compare", "other.yaml")
    assert found["compared"]["layout"]["tp"] == 2


def test_nodes_of_another_machine(job):
    found = json.loads(run(job, "--with", "dgx-h100=2", "--json"))
    assert [s["machine"] for s in found["shares"]] == ["dgx-a100", "dgx-h100"]
    slow, fast = found["shares"]
    assert fast["micro_batches"] > slow["micro_batches"]
    assert "micro-batches" in run(job, "--with", "dgx-h100=2")
    run(job, "--with", "dgx-h100", code=Exit.USAGE)


def test_no_search(job):
    found = data(job, "--no-search")
    assert found["alternatives"] == [] and found["layouts_scored"] == 0


def test_models_of_ones_own_are_refused_with_a_way_out(job, tmp_path):
    (tmp_path / "own.yaml").write_text(
        JOB.replace("{preset: llama-8b}", "{module: my.model:build}").replace(
            "parallel: {tensor: 4, sharding: zero3}", ""
        )
    )
    result = CliRunner(**_separate()).invoke(main, ["plan", "own.yaml"])
    assert result.exit_code == Exit.USAGE
    assert "my.model:build" in result.stderr and "layers, hidden" in result.stderr


def test_starts_without_torch(job):
    import subprocess
    import sys

    code = (
        "import sys; from hpctrain.cli import main\n"
        "try: main(['plan', 'job.yaml', '--json'])\n"
        "except SystemExit: pass\n"
        "assert not {'torch', 'mpi4py', 'h5py'} & set(sys.modules), 'heavy imports'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_calibrate_measures_this_node(job, tmp_path):
    result = CliRunner().invoke(main, ["calibrate", "--quick", "--output", "here.yaml", "--json"])
    assert result.exit_code == 0, result.output
    document = yaml.safe_load((tmp_path / "here.yaml").read_text())
    assert document["base"] == "local"
    measured = document["measured"]
    assert set(measured["values"]) >= {"gemm", "memory", "layer_seconds", "link", "hop_seconds"}
    assert all(value >= 0 for value in measured["values"].values())
    assert measured["write_bandwidth"] > 1e6
    # and the planner uses it and says so
    found = data(
        job, "--set", "machine=./here.yaml", "--set", "nodes=1", "--set", "ranks_per_node=2",
        "--set", "model.preset=gpt2-124m", "--set", "data.sequence_length=256",
        "--set", "train.global_batch=8", "--set", "train.precision=fp32",
        "--set", "parallel.tensor=1", "--set", "parallel.sharding=none",
    )  # fmt: skip
    assert found["numbers"]["source"] == "measured"
    assert not any("guesses" in w["text"] for w in found["warnings"])
    assert found["run"]["checkpoint_seconds"] == pytest.approx(
        12 * 124_439_808 / measured["write_bandwidth"], rel=0.02
    )


def test_the_command_is_listed():
    assert plan_command.short_help
    assert "plan" in CliRunner().invoke(main, ["--help"]).output
