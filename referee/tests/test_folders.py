"""Folders: pairs by name, a run that was killed and goes on, several workers."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from time import monotonic, sleep

import pytest
import torch
from texts import IMPORTS, module, reference

from referee import command, folders

ROOT = Path(__file__).resolve().parent.parent.parent
RELU = IMPORTS + reference("return torch.relu(x)", "[torch.rand(8, 256)]")
PLAIN = IMPORTS + module("return torch.relu(x)")
WRONG = IMPORTS + module("return x + 1")


def make(folder: Path, texts: dict[str, str]) -> Path:
    """A folder with files of these texts."""
    for name, text in texts.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


@pytest.fixture
def problems(tmp_path):
    names = ("level1/19_ReLU.py", "level1/20_Other.py", "level2/19_Another.py")
    return make(tmp_path / "problems", dict.fromkeys(names, RELU))


def test_pairs(problems, tmp_path):
    names = ["level1/19_ReLU.py", "20_Other.py", "level_2_problem_19_sample_0_kernel.py", "x.py"]
    solutions = make(tmp_path / "solutions", dict.fromkeys(names, PLAIN))
    paired, alone = folders.pair(problems, [solutions])
    found = {
        problem.relative_to(problems).as_posix(): [p.name for p in files]
        for problem, files in paired.items()
    }
    assert found == {
        "level1/19_ReLU.py": ["19_ReLU.py"],
        "level1/20_Other.py": ["20_Other.py"],
        "level2/19_Another.py": ["level_2_problem_19_sample_0_kernel.py"],
    }
    assert [path.name for path in alone] == ["x.py"]


def test_a_line_that_a_killed_run_left_is_cut_off(tmp_path):
    path = tmp_path / "out"
    path.write_text('{"file": "a"}\n{"file": "b"}\n{"fi')
    assert folders._read_out(path) == [{"file": "a"}, {"file": "b"}]
    assert path.read_text() == '{"file": "a"}\n{"file": "b"}\n'


@pytest.mark.slow
def test_a_killed_run_goes_on(problems, tmp_path, capsys):
    solutions = tmp_path / "solutions"
    for name in ("19_ReLU", "20_Other"):
        make(solutions, {f"{i}/{name}.py": WRONG if i == 2 else PLAIN for i in range(3)})
    out, table = tmp_path / "out.jsonl", tmp_path / "table.csv"
    options = ["--device", "cpu", "--trials", "3", "--out", str(out)]
    line = [sys.executable, "-m", "referee", str(problems), str(solutions), *options]
    process = subprocess.Popen(line, cwd=ROOT, start_new_session=True, stdout=subprocess.DEVNULL)
    end = monotonic() + 200
    while not (out.exists() and out.read_text().count("\n") >= 2):
        assert process.poll() is None and monotonic() < end
        sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    before = [json.loads(line)["file"] for line in out.read_text().splitlines()]
    status = command.main([str(problems), str(solutions), *options, "--csv", str(table)])
    records = [json.loads(line) for line in out.read_text().splitlines()]
    names = [record["file"] for record in records]
    assert names[: len(before)] == before
    assert len(names) == len(set(names)) == 6
    assert status == 1
    verdicts = {name: r["verdict"] for name, r in zip(names, records, strict=True)}
    assert sorted(verdicts.values()) == ["correct"] * 4 + ["wrong"] * 2
    assert table.read_text().count("\n") == 7
    output = capsys.readouterr().out
    assert "4 of 6 correct; fast_0 0.67; fast_1 " in output


@pytest.mark.slow
def test_workers(problems, tmp_path):
    names = ["level1/19_ReLU.py", "level1/20_Other.py", "level2/19_Another.py"]
    solutions = make(tmp_path / "solutions", dict.fromkeys(names, PLAIN))
    out = tmp_path / "out.jsonl"
    devices = "cpu,cpu:0" if not torch.cuda.device_count() > 1 else "cuda:0,cuda:1"
    options = ["--devices", devices, "--trials", "3", "--out", str(out)]
    assert command.main([str(problems), str(solutions), *options]) == 0
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert sorted(record["problem"] for record in records) == sorted(n[:-3] for n in names)
