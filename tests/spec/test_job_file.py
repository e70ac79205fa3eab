"""The job file: YAML 1.2, every fault at once and in its place, nothing lost on the way."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.errors import ImpossibleError, SpecError, UsageError
from hpctrain.spec import dump_job, parse_job, read_job, resolve
from hpctrain.spec.job import JobSpec
from hpctrain.spec.presets import PRESETS
from hpctrain.spec.resolve import check, layout_of
from hpctrain.spec.yaml_tree import Scalar, dump, load_tree, plain

MINIMAL = """\
model: {layers: 2, hidden: 64, heads: 4, vocab_size: 256}
data: {path: tokens.h5, sequence_length: 32}
train: {steps: 10, global_batch: 8}
"""


class TwoDevices:
    devices_per_node = 2


def problems(text: str, overrides: tuple[str, ...] = ()) -> dict[str, str]:
    with pytest.raises(SpecError) as caught:
        parse_job(text, "job.yaml", overrides)
    return {str(p).split(": ")[0] + " " + p.key: p.message for p in caught.value.problems}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("1e3", 1000.0),
        ("no", "no"),
        ("on", "on"),
        ("yes", "yes"),
        ("12:00:00", "12:00:00"),
        ("1_000", "1_000"),
        ("0o17", 15),
        ("0x1F", 31),
        ("012345", 12345),
        ("true", True),
        ("~", None),
        ("2026-01-31", "2026-01-31"),
        ("'5'", "5"),
        (".inf", float("inf")),
        ("+12", 12),
        ("1.", 1.0),
        ("=", "="),
    ],
)
def test_scalars_follow_the_core_schema_of_yaml_1_2(text, value):
    assert plain(load_tree(f"key: {text}", "f").value) == {"key": value}


def test_text_fields_keep_what_was_written():
    job = parse_job(
        MINIMAL
        + """\
name: 1.10
slurm: {account: 012345, time: 12:00:00, partition: no}
env: {A: 1.10, B: no, C: TRUE, D: 007, E: "a, b", F: "x\\ny", G: 'it''s $HOME `id` ^', H: 1e-4}
"""
    ).spec
    assert job.name == "1.10"
    assert job.slurm.account == "012345"
    assert job.slurm.partition == "no"
    assert job.slurm.time == 12 * 3600
    assert job.env == {
        "A": "1.10",
        "B": "no",
        "C": "TRUE",
        "D": "007",
        "E": "a, b",
        "F": "x\ny",
        "G": "it's $HOME `id` ^",
        "H": "1e-4",
    }


def test_every_fault_is_told_at_once_with_its_place():
    found = problems(
        """\
model: {layers: 2, hidden: 64, heads: 4, vocab_size: 256, actvation: gelu}
data: {path: tokens.h5, sequence_length: 1.5}
train:
  steps: 10
  global_batch: 8
  lr: fast
  schedule: cosin
  betas: [0.9, 1.5]
slurm:
  time: 1:30
"""
    )
    assert found.keys() == {
        "job.yaml:1:59 model.actvation",
        "job.yaml:2:25 data.sequence_length",
        "job.yaml:6:3 train.lr",
        "job.yaml:7:3 train.schedule.kind",
        "job.yaml:8:16 train.betas[1]",
        "job.yaml:10:3 slurm.time",
    }
    assert "did you mean activation?" in found["job.yaml:1:59 model.actvation"]
    assert "'fast'" in found["job.yaml:6:3 train.lr"]
    assert "did you mean cosine?" in found["job.yaml:7:3 train.schedule.kind"]
    assert "ambiguous" in found["job.yaml:10:3 slurm.time"]


@pytest.mark.parametrize(
    ("text", "where", "words"),
    [
        ("name: a\nname: b\n", "job.yaml:2:1 name", "stands twice; it was first given in line 1"),
        ("- a\n- b\n", "job.yaml:1:1 ", "a job file is a mapping"),
        ("a: !!python/object:os.system x\n", "job.yaml:1:4 a", "is not taken here"),
        ("a: !evil x\n", "job.yaml:1:4 a", "tag !evil"),
        ("a: [1\n", "job.yaml:2:1 ", "not valid YAML"),
        ("a: b\n---\nc: d\n", "job.yaml:2:1 ", "single document"),
        ("? [a]\n: b\n", "job.yaml:1:3 ", "a key must be text"),
        ("a: {{{", "job.yaml:1:7 ", "not valid YAML"),
        ("\ta: b", "job.yaml:1:1 ", "not valid YAML"),
    ],
)
def test_what_is_not_a_job_file(text, where, words):
    found = problems(text)
    assert where in found
    assert words in found[where]


def test_aliases_cannot_make_a_bomb():
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 9)]
    with pytest.raises(SpecError, match="repeat without end"):
        parse_job("\n".join(lines))


def test_missing_sections_say_what_belongs_there():
    found = problems("name: x\n")
    assert {key.split(" ")[1] for key in found} == {"model", "data", "train"}
    assert all("missing" in message for message in found.values())


@pytest.mark.parametrize(
    ("change", "key", "words"),
    [
        ("model.heads=3", "model", "does not divide into 3 heads"),
        ("model.kv_heads=3", "model", "do not divide into 3 kv_heads"),
        ("model.module=a.b:c", "model", "module excludes layers"),
        ("model.dropout=1", "model.dropout", "less than 1"),
        ("model.preset=gpt3", "model.preset", "no preset 'gpt3'"),
        ("train.lr=0", "train.lr", "more than 0"),
        ("train.lr=nan", "train.lr", "'nan'"),
        ("train.lr=.nan", "train.lr", "finite"),
        ("train.steps=0", "train.steps", "at least 1"),
        ("train.steps=true", "train.steps", "whole number"),
        ("train.clip=-1", "train.clip", "positive norm"),
        ("train.min_lr=1", "train", "above lr"),
        ("train.schedule.warmup_steps=11", "train", "more than all 10 steps"),
        ("nodes=two", "nodes", "'two'"),
        ("env.A=[1]", "env.A", "a list"),
        ("env=x", "env", "mapping"),
        ("data.module=x", "data.module", "package.module:function"),
        ("data.path=null", "data", "either path"),
        ("slurm.account='a; rm -rf /'", "slurm.account", "letters, digits"),
        ("slurm.time=29s", "slurm.time", "at least one minute"),
        ("slurm.sbatch_options=[rm]", "slurm.sbatch_options[0]", "an option such as"),
        ('slurm.comment="a\\nb"', "slurm.comment", "line breaks"),
        ("bogus", "", "key=value"),
        ("train.lrr=1", "train.lrr", "did you mean lr?"),
        ("train.lr.x=1", "train.lr", "a mapping"),
        ("model.bias=no", "model.bias", "write true or false"),
    ],
)
def test_bad_overrides_name_the_key(change, key, words):
    found = problems(MINIMAL, (change,))
    message = next(m for where, m in found.items() if where.split(" ")[-1] == key)
    assert words in message


def test_a_model_in_one_word_is_a_preset_and_can_be_changed():
    text = MINIMAL.replace("{layers: 2, hidden: 64, heads: 4, vocab_size: 256}", "gpt2-124m")
    job = parse_job(text, overrides=("model.dropout=0.1", "model.layers=6"))
    assert (job.spec.model.hidden, job.spec.model.layers) == (768, 6)
    assert job.source("model.hidden").where.startswith("gpt2-124m (GPT-2 small")
    assert job.source("model.layers").where == "--set model.layers=6"
    assert job.source("train.steps").where == "job.yaml:3:9"
    assert job.source("train.lr").kind == "default"


@pytest.mark.parametrize(
    ("preset", "parameters"),
    [
        # the published models' own counts
        ("gpt2-124m", 124_439_808),
        ("gpt2-355m", 354_823_168),
        ("gpt2-774m", 774_030_080),
        ("gpt2-1.5b", 1_557_611_200),
        ("llama-1b", 1_235_814_400),
        ("llama-8b", 8_030_261_248),
        ("llama-70b", 70_553_706_496),
        ("llama-405b", 405_853_388_800),
    ],
)
def test_presets_have_the_published_number_of_parameters(preset, parameters):
    spec = resolved(f"model: {preset}\n" + MINIMAL.split("\n", 1)[1]).spec
    assert spec.model.transformer().parameters == parameters


def resolved(text: str, *overrides: str, devices: int = 2, folder: Path = Path("/work dir")):
    site = TwoDevices()
    site.devices_per_node = devices
    job = resolve(parse_job(text, overrides=overrides), site, folder)
    check(job)
    return job


def test_a_resolved_job_has_nothing_left_open():
    spec = resolved(MINIMAL, "nodes=2").spec
    assert (spec.ranks_per_node, spec.parallel.data, spec.train.micro_batch) == (2, 4, 2)
    assert spec.checkpoint.every == 1
    assert spec.data.path == "/work dir/tokens.h5"
    dims = spec.model.transformer()
    assert (dims.kv_heads, dims.ffn_hidden, dims.max_positions) == (4, 256, 32)
    assert layout_of(spec).world_size == 4


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("train.global_batch=7", "7 samples do not divide over 2"),
        ("train.micro_batch=3", "these do: 1, 2, 4"),
        ("parallel.data=3", "data"),
        ("data.sequence_length=64", "more than model.max_positions 32"),
    ],
)
def test_numbers_that_do_not_divide_are_impossible(change, words):
    with pytest.raises(ImpossibleError, match=words) as caught:
        resolved(MINIMAL, "model.max_positions=32", change)
    assert caught.value.exit_code == 3
    assert f"--set {change}" in str(caught.value)


def test_unreadable_files_are_told_plainly(tmp_path):
    with pytest.raises(UsageError, match="no such file"):
        read_job(tmp_path / "none.yaml")
    with pytest.raises(UsageError, match="cannot be read"):
        read_job(tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"name: caf\xe9\n")
    with pytest.raises(UsageError, match="not UTF-8"):
        read_job(tmp_path / "latin.yaml")


@pytest.mark.parametrize("preset", PRESETS)
def test_a_written_job_reads_back_the_same(preset):
    spec = resolved(f"model: {preset}\n" + MINIMAL.split("\n", 1)[1]).spec
    assert parse_job(dump_job(spec)).spec == spec


values = st.one_of(
    st.text(st.characters(exclude_categories=("Cs", "Cc")), max_size=20),
    st.sampled_from(["no", "1e3", "0o7", "012", "~", "null", "true", "1:30", "-", "#", "a: b"]),
)


@given(st.dictionaries(st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,8}", fullmatch=True), values))
def test_any_environment_survives_the_written_job(env):
    job = parse_job(MINIMAL).spec
    changed = job.model_copy(update={"env": env})
    assert parse_job(dump_job(changed)).spec.env == env


@given(
    st.recursive(
        st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), values),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(values, inner, max_size=3),
        max_leaves=8,
    )
)
def test_what_is_dumped_loads_as_the_same_data(data):
    assert plain(load_tree(dump({"key": data}), "f").value) == {"key": data}


def test_arguments_of_a_users_function_are_plain_values():
    text = (
        "model: {module: 'a.b:c', args: {x: 1, y: [1e-3, {z: no}]}}\n" + MINIMAL.split("\n", 1)[1]
    )
    args = parse_job(text).spec.model.args
    assert args == {"x": 1, "y": [1e-3, {"z": "no"}]}
    assert not any(isinstance(value, Scalar) for value in args.values())


def test_a_job_cannot_be_changed_after_it_was_read():
    job = parse_job(MINIMAL).spec
    assert isinstance(job, JobSpec)
    with pytest.raises(ValueError, match="frozen"):
        job.name = "other"
