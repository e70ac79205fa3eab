"""init, explain, schema, submit --dry-run: what needs a job file and nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from hpctrain.cli import main
from hpctrain.machine import get_machine, machine_names
from hpctrain.spec import read_job
from hpctrain.units import parse_walltime

HPCTRAIN = str(Path(sys.executable).parent / "hpctrain")
JOB = """\
name: tiny
ranks_per_node: 2
model: {layers: 2, hidden: 32, heads: 2, vocab_size: 256}
data: {path: tokens.h5, sequence_length: 32}
train:
  steps: 20
  global_batch: 8
  lr: 1e-3
slurm: {time: 1h30m}
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text(JOB)
    return tmp_path


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


def files(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*"))


# ---- init ---------------------------------------------------------------------------------


@pytest.mark.parametrize("machine", machine_names())
def test_init_writes_a_job_that_every_machine_takes(machine: str, here: Path) -> None:
    result = run("init", "--machine", machine, "new.yaml")
    assert result.exit_code == 0, result.output
    spec = read_job(here / "new.yaml").spec
    assert spec.machine == machine
    dry = run("submit", "new.yaml", "--dry-run")
    assert dry.exit_code == 0, dry.output
    if get_machine(machine).scheduling.account_required:
        assert spec.slurm.account == "CHANGE-ME"
        assert "slurm.account is your project's" in result.stdout
    # One rank a device, and every rank has the same share of the batch.
    assert spec.train.global_batch % get_machine(machine).devices_per_node == 0 or machine == (
        "local"
    )


def test_init_comments_are_the_descriptions_of_the_keys(here: Path) -> None:
    assert run("init", "new.yaml").exit_code == 0
    text = (here / "new.yaml").read_text()
    from hpctrain.cli.reference import all_keys

    wanted = {key.key: key.meaning for key in all_keys()}
    comments = " ".join(
        line.strip().removeprefix("# ") for line in text.splitlines() if line.strip()[:1] == "#"
    )
    for key in ("name", "model.hidden", "data.path", "train.lr", "checkpoint.keep", "env"):
        assert wanted[key] in comments
    assert max(len(line) for line in text.splitlines()) <= 90


def test_init_never_overwrites(here: Path) -> None:
    before = (here / "job.yaml").read_bytes()
    result = run("init")
    assert result.exit_code == 2
    assert "job.yaml exists and is left as it is" in result.stderr
    assert (here / "job.yaml").read_bytes() == before
    assert run("init", "no/such/dir.yaml").exit_code == 2


def test_init_of_an_unknown_machine_names_the_nearest(here: Path) -> None:
    result = run("init", "--machine", "fronteir", "new.yaml")
    assert result.exit_code == 2
    assert "did you mean frontier?" in result.stderr
    assert not (here / "new.yaml").exists()


# ---- explain ------------------------------------------------------------------------------


def explained(*arguments: str) -> dict[str, Any]:
    result = run("explain", *arguments, "--json")
    assert result.exit_code == 0, result.output
    answer: dict[str, Any] = json.loads(result.stdout)
    assert answer["schema_version"] == 1
    return answer


@pytest.mark.parametrize(
    ("key", "overrides", "value", "source", "where"),
    [
        ("train.lr", [], 1e-3, "file", "job.yaml:8:3"),
        ("train.lr", ["train.lr=2e-3"], 2e-3, "set", "--set train.lr=2e-3"),
        ("train.clip", [], 1.0, "default", "hpctrain"),
        ("train.micro_batch", [], 4, "resolved", "worked out from the other keys"),
        ("parallel.data", [], 2, "resolved", "worked out from the other keys"),
        ("model.ffn_hidden", [], 128, "resolved", "worked out from the other keys"),
        ("slurm.time", [], 5400, "file", "job.yaml:9:9"),
        ("env.A", ["env.A=1,2"], "1,2", "set", "--set env.A=1,2"),
    ],
)
def test_explain_says_where_a_value_came_from(
    here: Path, key: str, overrides: list[str], value: Any, source: str, where: str
) -> None:
    sets = [part for override in overrides for part in ("--set", override)]
    answer = explained(key, "job.yaml", *sets)
    assert (answer["value"], answer["source"], answer["where"]) == (value, source, where)


def test_explain_names_the_preset_and_its_publication(here: Path) -> None:
    (here / "job.yaml").write_text(JOB.replace(
        "{layers: 2, hidden: 32, heads: 2, vocab_size: 256}", "gpt2-124m"))  # fmt: skip
    answer = explained("model.hidden", "job.yaml")
    assert (answer["value"], answer["source"]) == (768, "preset")
    assert answer["where"] == "gpt2-124m (GPT-2 small, Radford et al. 2019)"


def test_explain_in_words(here: Path) -> None:
    result = run("explain", "slurm.time", "job.yaml")
    assert result.exit_code == 0
    assert result.stdout.splitlines()[0] == "slurm.time"
    rows = dict(line.split(None, 1) for line in result.stdout.splitlines()[2:])
    assert rows["unit"] == "seconds"
    assert rows["value"] == "0-01:30:00"
    assert rows["from"] == "file: job.yaml:9:9"


def test_explain_a_section_lists_its_keys(here: Path) -> None:
    answer = explained("train.schedule")
    assert answer["section"] is True
    assert answer["shorthand"] == "train.schedule.kind"
    assert answer["keys"] == [
        "train.schedule.kind", "train.schedule.warmup_steps", "train.schedule.decay_steps",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("trian.lr", "train.lr"), ("lr", "train.lr"), ("model.layer", "model.layers"),
     ("slurm.walltime", "slurm.time")],
)  # fmt: skip
def test_explain_of_an_unknown_key_names_the_nearest(typed: str, meant: str) -> None:
    result = run("explain", typed)
    assert result.exit_code == 2
    assert meant in result.stderr


def test_explain_shows_the_values_of_an_impossible_job_too(here: Path) -> None:
    result = run("explain", "train.global_batch", "job.yaml", "--set", "train.global_batch=7")
    assert result.exit_code == 0
    assert "impossible" in result.stderr
    assert "value    7" in result.stdout


def test_every_key_has_words_and_every_count_a_unit() -> None:
    from hpctrain.cli.reference import all_keys

    for key in all_keys():
        assert key.meaning, key.key
        if key.type.startswith("whole number") and key.key != "train.seed":
            assert key.unit, f"{key.key}: reference.UNITS should say what it counts"


# ---- schema -------------------------------------------------------------------------------


def test_schema_is_json_schema_with_every_key() -> None:
    result = run("schema")
    assert result.exit_code == 0
    schema = json.loads(result.stdout)
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    model = schema["$defs"]["ModelSpec"]["anyOf"]
    assert model[0]["properties"]["layers"]["description"] == "Transformer blocks."
    assert {"type": "null"} in model
    assert any(kind.get("title") == "preset" for kind in model)  # model: gpt2-124m
    assert set(schema["required"]) == {"model", "data", "train"}
    assert schema["additionalProperties"] is False


def test_job_file_page_is_up_to_date() -> None:
    page = Path(__file__).parents[2] / "docs" / "job-file.md"
    result = run("schema", "--markdown")
    assert page.read_text() == result.stdout, "run: hpctrain schema --markdown > docs/job-file.md"


# ---- submit --dry-run ---------------------------------------------------------------------


def dry_run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [HPCTRAIN, "submit", "job.yaml", "--dry-run", *arguments],
        capture_output=True, text=True, timeout=60, cwd=cwd, check=False,
    )  # fmt: skip


def test_dry_run_is_byte_stable_passes_bash_and_touches_nothing(here: Path) -> None:
    before = files(here)
    first, second = dry_run(cwd=here), dry_run(cwd=here)
    assert first.returncode == 0, first.stderr
    assert first.stdout == second.stdout
    assert first.stdout.startswith("#!/bin/bash\n")
    assert "#SBATCH --time=0-01:30:00\n" in first.stdout
    assert "#SBATCH --ntasks-per-node=2\n" in first.stdout
    assert files(here) == before
    checked = subprocess.run(
        ["bash", "-n"], input=first.stdout, text=True, capture_output=True, check=False
    )
    assert (checked.returncode, checked.stderr) == (0, "")


def test_dry_run_loads_nothing_heavy(here: Path) -> None:
    script = (
        "import sys\n"
        "sys.argv = ['hpctrain', 'submit', 'job.yaml', '--dry-run']\n"
        "from hpctrain.cli import main\n"
        "try:\n    main()\nexcept SystemExit as error:\n    assert error.code == 0\n"
        "print([m for m in ('torch', 'mpi4py', 'h5py', 'numpy', 'rich') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"


def test_hostile_values_reach_bash_byte_for_byte(here: Path) -> None:
    hostile = {
        "NCCL_NET": "AWS Libfabric",
        "NCCL_PROTO": "^LL128",
        "FI_CXI": "hsn0,hsn1",
        "QUOTES": 'it\'s "quoted" `id` $HOME ${PATH} $(id)',
        "LINES": "a\nb\n",
        "BACK": "\\n \\\\ \t",
    }
    (here / "job.yaml").write_text(JOB + yaml.safe_dump({"env": hostile}))
    done = dry_run(cwd=here)
    assert done.returncode == 0, done.stderr
    exports = [line for line in done.stdout.splitlines() if line.strip().startswith("export ")]
    mine = "\n".join(line for line in exports if line.split()[1].split("=")[0] in hostile)
    printed = subprocess.run(
        ["env", "-i", "bash", "-c", f"{mine}\nexec /usr/bin/env -0"],
        capture_output=True, check=True,
    ).stdout  # fmt: skip
    found = dict(part.split(b"=", 1) for part in printed.split(b"\0") if part)
    for name, value in hostile.items():
        assert found[name.encode()] == value.encode()


@pytest.mark.parametrize(
    ("overrides", "code", "said"),
    [
        (["train.lr=fast"], 2, "train.lr"),
        (["train.global_batch=7"], 3, "7 samples do not divide over 2 data-parallel ranks"),
        (["machine=fronteir"], 2, "did you mean frontier?"),
        (["machine=frontier", "slurm.account=abc", "slurm.time=2-00:00:00"], 3, "longest"),
        (["machine=frontier", "ranks_per_node=99", "train.global_batch=99"], 3, "99 ranks a node"),
        (["env.UID=3"], 2, "env.UID"),
        (["slurm.time=1:30"], 2, "ambiguous"),
        (["no_such_key=1"], 2, "unknown key"),
        (["nonsense"], 2, "write it as key=value"),
    ],
)
def test_dry_run_refuses_what_cannot_be(
    here: Path, overrides: list[str], code: int, said: str
) -> None:
    before = files(here)
    sets = [part for override in overrides for part in ("--set", override)]
    result = run("submit", "job.yaml", "--dry-run", *sets)
    assert result.exit_code == code, result.output
    assert said in result.stderr
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    assert files(here) == before


def test_a_missing_job_file_says_how_to_get_one(here: Path) -> None:
    result = run("submit", "absent.yaml")
    assert result.exit_code == 2
    assert "hpctrain init absent.yaml" in result.stderr


def test_local_submit_without_its_data_makes_nothing(here: Path) -> None:
    before = files(here)
    result = run("submit", "job.yaml", "--launcher", "local")
    assert result.exit_code == 2
    assert f"job.yaml:4:8: data.path: no file {here / 'tokens.h5'}" in result.stderr
    assert "hpctrain data tokenize" in result.stderr
    assert files(here) == before


def test_walltime_of_the_script_is_the_one_asked_for(here: Path) -> None:
    for asked in ("90", "1h30m", "0-01:30", "01:30:00", "1-0"):
        result = run("submit", "job.yaml", "--dry-run", "--set", f"slurm.time={asked}")
        line = next(x for x in result.stdout.splitlines() if x.startswith("#SBATCH --time="))
        printed = line.partition("=")[2]
        assert parse_walltime(printed) == parse_walltime(asked)
