"""Folders of references and solutions: pairs by name, killed runs that go on, several workers."""

import errno
import json
import multiprocessing
import os
import signal
import subprocess
import sys
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Thread
from time import monotonic, sleep
from types import SimpleNamespace

import pytest
import torch

from referee.program import arguments as arguments_module
from referee.program import command, folder_workers, folders, fork_server
from referee.program.file_queue import FileQueue, Task
from referee.program.pairs import pair
from referee.report import folder_table, graded_files
from referee.testing.texts import IMPORTS, module, reference

ROOT = Path(__file__).resolve().parent.parent.parent
RELU = IMPORTS + reference("return torch.relu(x)", "[torch.rand(8, 256)]")
PLAIN = IMPORTS + module("return torch.relu(x)")
WRONG = IMPORTS + module("return x + 1")
# The problems, and solutions of the same names.
NAMES = ("level1/19_ReLU.py", "level1/20_Other.py", "level2/19_Another.py")


def make(folder: Path, texts: dict[str, str]) -> Path:
    """Make a folder with files of these texts, and return it."""
    for name, text in texts.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


@pytest.fixture
def problems(tmp_path):
    return make(tmp_path / "problems", dict.fromkeys(NAMES, RELU))


def test_solutions_are_paired_by_path_by_name_or_by_kernelbenchs_numbers(problems, tmp_path):
    names = ["level1/19_ReLU.py", "20_Other.py", "level_2_problem_19_sample_0_kernel.py", "x.py"]
    solutions = make(tmp_path / "solutions", dict.fromkeys(names, PLAIN))
    paired, unpaired = pair(problems, [solutions])
    names_of = {
        problem.relative_to(problems).as_posix(): [p.name for p in files]
        for problem, files in paired.items()
    }
    assert names_of == {
        "level1/19_ReLU.py": ["19_ReLU.py"],
        "level1/20_Other.py": ["20_Other.py"],
        "level2/19_Another.py": ["level_2_problem_19_sample_0_kernel.py"],
    }
    assert [path.name for path in unpaired] == ["x.py"]


def test_a_file_that_is_named_twice_is_taken_once(problems, tmp_path):
    solutions = make(tmp_path / "solutions", {"19_ReLU.py": PLAIN, "20_Other.py": PLAIN})
    again = solutions / ".." / "solutions" / "20_Other.py"
    paired, unpaired = pair(problems, [solutions, again])
    assert [p.name for files in paired.values() for p in files] == ["19_ReLU.py", "20_Other.py"]
    assert unpaired == []


def test_a_number_that_two_problems_have_decides_nothing(problems, tmp_path):
    make(problems, {"level1/19_Other_ReLU.py": RELU, "level1/folder.py/1_x.py": RELU})
    name = "level_1_problem_19_sample_0_kernel.py"
    paired, unpaired = pair(problems, [make(tmp_path / "solutions", {name: PLAIN})])
    assert not paired
    assert [path.name for path in unpaired] == [name]


def verdict(name: str) -> dict:
    """Return the least that the record of a correct file has."""
    return {"problem": "p", "file": name, "verdict": "correct", "reason": "", "runs": []}


def test_a_line_that_a_killed_run_left_is_cut_off(tmp_path):
    path, records = tmp_path / "out", [verdict("a"), verdict("b")]
    whole_lines = "".join(f"{json.dumps(record)}\n" for record in records)
    for unfinished_line in ("", '{"pro', json.dumps(verdict("c"))):
        path.write_text(whole_lines + unfinished_line)
        assert folders.read_out(path) == records
        assert path.read_text() == whole_lines


@pytest.mark.parametrize(
    "text", ["notes", "notes\n", '{"a": 1}', '{"a": 1}\n', f"{json.dumps(verdict('a'))}\nnotes"]
)
def test_a_file_of_something_else_is_left_alone(text, problems, tmp_path, capsys):
    path = tmp_path / "out"
    path.write_text(text)
    solutions = make(tmp_path / "solutions", {"20_Other.py": PLAIN})
    with pytest.raises(SystemExit) as stopped:
        command.main([str(problems), str(solutions), "--device", "cpu", "--out", str(path)])
    assert stopped.value.code == 2
    assert path.read_text() == text
    assert "--out is for another file" in capsys.readouterr().err


@pytest.mark.parametrize(
    "options",
    [
        "--devices cpu,tpu",
        "--devices cpu,",
        "--devices cpu --device cpu",
        "--markdown table.md",
        "--out /no/such/folder/out",
        "--out {one}",
        "--csv {one}",
    ],
)
def test_options_that_make_no_sense_are_refused_in_one_line(options, problems, tmp_path, capsys):
    solutions = make(tmp_path / "solutions", {"20_Other.py": PLAIN})
    one = solutions / "20_Other.py"
    with pytest.raises(SystemExit) as stopped:
        command.main([str(problems), str(one), *options.format(one=one).split()])
    output = capsys.readouterr()
    assert (stopped.value.code, output.out, output.err.count("\n")) == (2, "", 1)
    assert one.read_text() == PLAIN


@pytest.mark.parametrize("options", ["--csv table.csv", "--out out", "--devices cpu"])
def test_options_for_folders_are_refused_for_single_files(options, tmp_path, capsys):
    make(tmp_path, {"reference.py": RELU, "solution.py": PLAIN})
    files = [str(tmp_path / "reference.py"), str(tmp_path / "solution.py")]
    with pytest.raises(SystemExit) as stopped:
        command.main([*files, *options.split()])
    assert stopped.value.code == 2
    assert " is for folders of references; for a file use --" in capsys.readouterr().err


def test_a_problem_without_memory_is_told(tmp_path, monkeypatch, capsys):
    """The reference of a single file is prepared before there is a session."""

    def need_more(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.\nMore is said of it.")

    make(tmp_path, {"reference.py": RELU, "solution.py": PLAIN})
    files = [str(tmp_path / "reference.py"), str(tmp_path / "solution.py")]
    monkeypatch.setattr(command, "Problem", need_more)
    with pytest.raises(SystemExit) as stopped:
        command.main([*files, "--device", "cpu"])
    assert stopped.value.code == 2
    assert "no memory to prepare the problem: CUDA out of memory.\n" in capsys.readouterr().err


def test_each_reference_imports_the_helper_of_its_own_folder(tmp_path):
    """Both helpers have the same name. Solutions import neither."""
    texts, solution_texts = {}, {}
    for folder, factor in (("a", 2.0), ("b", 3.0)):
        solution_texts[f"{folder}/p.py"] = IMPORTS + module(f"return x * {factor}")
        texts[f"{folder}/helper.py"] = f"FACTOR = {factor}\n"
        forward = "return x * helper.FACTOR"
        texts[f"{folder}/p.py"] = (
            f"import helper\n{IMPORTS}{reference(forward, '[torch.rand(8, 256)]')}"
        )
    problems = make(tmp_path / "problems", texts)
    solutions = make(tmp_path / "solutions", solution_texts)
    out = tmp_path / "out"
    options = ["--device", "cpu", "--trials", "1", "--out", str(out)]
    command.main([str(problems), str(solutions), *options])
    words = {record["problem"]: record["verdict"] for record in folders.read_out(out)}
    assert words.items() >= {"a/p": "correct", "b/p": "correct"}.items()


def test_a_full_disk_ends_the_program_with_a_line_and_the_summary(
    problems, tmp_path, monkeypatch, capsys
):
    def fill_disk(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(folders.os, "fsync", fill_disk)
    monkeypatch.setattr(folders, "grade_tasks", lambda *_: (verdict(name) for name in "ab"))
    solutions = make(tmp_path / "solutions", {"20_Other.py": PLAIN})
    out = tmp_path / "out"
    with pytest.raises(SystemExit) as stopped:
        command.main([str(problems), str(solutions), "--device", "cpu", "--out", str(out)])
    assert stopped.value.code == 1
    output = capsys.readouterr()
    assert f"cannot write {out}: No space left on device\n" in output.err
    assert "1 of 1 correct" in output.out


class Worker(Thread):
    """Takes the place of a worker's process: for each task it sends its name and its solution.

    Args:
        target: is not called.
        args: the worker's end of the pipe, its device, and the options.
    """

    ending_devices = ()  # the workers of these devices end at once

    def __init__(self, target, args):
        super().__init__()
        self.connection, self.device, _ = args
        self.connection = os.dup(self.connection.fileno())  # the command closes its own copy

    def run(self):
        with suppress(EOFError), Connection(self.connection) as connection:
            while self.device not in self.ending_devices:
                task = connection.recv()
                connection.send((task.name, *task.solutions))

    def terminate(self):
        """Do nothing: the end of the pipe ends the worker."""

    kill = terminate


def sent_by_workers(monkeypatch, solutions_of, device_count):
    """Return what workers send for some problems: pairs of a problem and solutions, sorted.

    Args:
        monkeypatch: pytest's fixture.
        solutions_of: by problem, its solutions, each a letter.
        device_count: the number of devices, which are cuda:0, cuda:1 and so on.
    """
    context = SimpleNamespace(Pipe=multiprocessing.Pipe, Process=Worker)
    monkeypatch.setattr(fork_server, "context", context)
    tasks = make_tasks(solutions_of)
    devices = [torch.device("cuda", index) for index in range(device_count)]
    return sorted(folder_workers.grade_tasks(tasks, devices, None, lambda *_: None))


def make_tasks(solutions_of):
    """Return tasks for some problems: by name, the solutions, each a letter."""
    return [Task(name, Path(name), b"", list(files)) for name, files in solutions_of.items()]


def test_a_worker_keeps_its_problem_and_helps_with_others_at_the_end():
    queue = FileQueue(make_tasks({"a": "123", "b": "12", "c": "12"}))
    latest = {1: "", 2: ""}  # the problem of each worker's task before

    def take(worker):
        task = queue.take(latest[worker])
        latest[worker] = task.name
        return task.name + "".join(task.solutions)

    assert [take(worker) for worker in (1, 2, 1)] == ["a1", "b1", "a2"]
    assert [take(2), take(2)] == ["b2", "c1"]
    assert len(queue) == 2
    assert take(1) == "a3"
    assert take(1) == "c2"  # helps
    assert queue.take("c") is None
    assert len(queue) == 0


def test_a_worker_helps_where_most_solutions_are_left():
    queue = FileQueue(make_tasks({"a": "12", "b": "1234"}))
    assert [queue.take("").name, queue.take("").name] == ["a", "b"]
    assert queue.take("an earlier problem").name == "b"


@pytest.mark.parametrize("device_count", [2, 3, 5])
@pytest.mark.parametrize("names", ["0", "012", "01234"])
def test_workers_grade_each_solution_once(names, device_count, monkeypatch):
    sent = sent_by_workers(monkeypatch, dict.fromkeys(names, "abcd"), device_count)
    assert sent == [(name, solution) for name in names for solution in "abcd"]


def test_a_worker_that_has_ended_is_told(monkeypatch, capsys):
    """The solution that it was to grade has no verdict; others go to other workers."""
    monkeypatch.setattr(Worker, "ending_devices", ("cuda:1",))
    problems = {"first", "second", "third", "fourth"}
    sent = sent_by_workers(monkeypatch, dict.fromkeys(problems, "a"), device_count=2)
    [lost] = problems - {name for name, _ in sent}
    assert f"the worker for {lost} has ended\n" in capsys.readouterr().err


def test_a_share_of_the_speed_of_light_may_round_to_zero():
    seconds = {"median_ms": 1e6, "ratio": 1.0, "ratio_low": 1.0, "ratio_high": 1.0, "time": "a tie"}
    forward = {"floor_seconds": 1e-6, "summary": [{**seconds, "role": "solution"}]}
    run = {"forward": forward, "step": None, "time": "a tie"}
    text = folder_table.summary([{**verdict("a"), "runs": [run]}])
    assert "geometric mean of 1: 0.0%" in text


def timed(name: str, word: str, ratio: float) -> dict:
    """Return the least that the record of a file with times has."""
    ends = {"ratio": ratio, "ratio_low": ratio, "ratio_high": ratio}
    row = {"median_ms": 1.0, **ends, "time": word, "role": "solution"}
    forward = {"floor_seconds": 0.0, "summary": [row]}
    return {**verdict(name), "runs": [{"forward": forward, "step": None, "time": word}]}


def test_fast_p_counts_correct_files_that_are_more_than_p_times_as_fast():
    """A tie, or a ratio that is too noisy, does not count for p = 1 and 2."""
    wrong = {**verdict("wrong"), "verdict": "wrong"}
    files = [
        timed("fast", "faster", 3.0),
        timed("a little faster", "faster", 1.5),
        timed("a tie", "a tie", 1.05),
        timed("noisy", "too noisy", 9.0),
        timed("slow", "slower", 0.5),
    ]
    text = folder_table.summary([*files, *[wrong] * 5])
    assert "5 of 10 correct; fast_0 0.50; fast_1 0.20; fast_2 0.10; " in text


def test_a_tie_counts_as_1_in_the_mean_and_in_the_ranking():
    records = [timed("tie.py", "a tie", 8.0), timed("fast.py", "faster", 4.0)]
    assert "geometric mean of 2 ratios: 2.000" in graded_files.scores(records)
    assert sorted(records, key=graded_files.counted_ratio)[0]["file"] == "tie.py"


def test_files_that_had_no_walls_are_counted():
    """Records of an earlier version, which `--out` has kept, need not say it."""
    without = {**verdict("without"), "walls": False}
    others = [{**verdict("with"), "walls": True}, {**verdict("not started"), "walls": None}]
    assert "1 of 4 files had no walls" in folder_table.summary([without, *others, verdict("old")])
    assert "no walls" not in folder_table.summary(others)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reference_text", "name", "message"),
    [
        ("x = 1\n", "relu.py", "1 files were not graded: their references cannot be graded"),
        (RELU, "other.py", "other.py: no reference has its name or number; not graded"),
    ],
)
def test_what_is_not_graded_is_named_and_makes_the_status_1(
    reference_text, name, message, tmp_path, capsys
):
    problems = make(tmp_path / "problems", {"relu.py": reference_text, "graded.py": RELU})
    solutions = make(tmp_path / "solutions", {name: PLAIN, "graded.py": PLAIN})
    assert command.main([str(problems), str(solutions), "--device", "cpu", "--trials", "1"]) == 1
    output = capsys.readouterr()
    assert message in output.out + output.err
    assert "1 of 1 correct" in output.out


@pytest.mark.slow
def test_a_file_of_results_that_cannot_be_written_makes_the_status_1(tmp_path, capsys):
    make(tmp_path, {"reference.py": RELU, "solution.py": PLAIN})
    files = [str(tmp_path / "reference.py"), str(tmp_path / "solution.py")]
    assert command.main([*files, "--device", "cpu", "--trials", "1", "--json", "/dev/full"]) == 1
    output = capsys.readouterr()
    assert "solution.py: correct" in output.out
    assert "cannot write /dev/full: No space left on device" in output.err


@pytest.mark.parametrize(
    ("count", "is_full", "seconds"),
    [(1, False, 2.5), (2, False, 1.25), (8, False, 0.625), (1, True, 16.0), (8, True, 4.0)],
)
def test_files_share_the_seconds_of_timing_but_each_gets_a_quarter(count, is_full, seconds):
    options = SimpleNamespace(full=is_full, trials=None, timeout=None)
    args = SimpleNamespace(reference=Path("x.py"), solution=["x.py"] * count, **vars(options))
    assert command.make_options(args).round_limit.cpu_seconds == seconds


def test_files_of_two_folders_share_no_seconds(problems, tmp_path):
    folders_of_solutions = [
        make(tmp_path / name, {"19_ReLU.py": PLAIN}) for name in ("first", "second")
    ]
    arguments = [str(problems), *map(str, folders_of_solutions)]
    args = arguments_module.make_parser().parse_args(arguments)
    assert command.make_options(args).round_limit.cpu_seconds == 2.5
    [task] = folders.find_work(args).tasks
    assert [file.path.parent.name for file in task.solutions] == ["first", "second"]


def relu_of(width: int) -> str:
    """Return the text of a reference for inputs of [8, width]."""
    return RELU.replace("256", str(width))


def start(*arguments: str, **options) -> subprocess.Popen:
    """Start the command in a session of its own."""
    line = [sys.executable, "-m", "referee", *arguments]
    return subprocess.Popen(line, cwd=ROOT, start_new_session=True, text=True, **options)


def wait_for_lines(path: Path, count: int, process: subprocess.Popen) -> None:
    """Wait until a file has so many lines, which the process writes."""
    end = monotonic() + 300
    while not (path.exists() and path.read_text().count("\n") >= count):
        assert process.poll() is None
        assert monotonic() < end
        sleep(0.05)


@pytest.mark.slow
def test_references_are_read_before_any_solution_runs(problems, tmp_path):
    """The first problem's solution rewrites the files of the other problems."""
    others = [str(problems / name) for name in NAMES[1:]]
    rewrites = f"for path in {others}:\n    open(path, 'w').write('raise ValueError')\n"
    solutions = make(tmp_path / "solutions", dict.fromkeys(NAMES, IMPORTS + rewrites + PLAIN))
    out = tmp_path / "out.jsonl"
    arguments = [problems, solutions, "--device", "cpu", "--trials", "1", "--out", out]
    assert command.main([str(argument) for argument in arguments]) == 0
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert [record["verdict"] for record in records] == ["correct"] * len(NAMES)


@pytest.mark.slow
def test_a_second_run_goes_on_where_a_killed_one_ended(tmp_path, capsys):
    """Twelve solutions over three problems: one verdict each, none twice, none lost."""
    problems = make(tmp_path / "problems", {f"{i}_ReLU.py": relu_of(64 + i) for i in range(3)})
    texts = {f"{j}/{i}_ReLU.py": WRONG if j == 2 else PLAIN for i in range(3) for j in range(4)}
    solutions = make(tmp_path / "solutions", texts)
    out, table = tmp_path / "out.jsonl", tmp_path / "table.csv"
    options = ["--device", "cpu", "--trials", "3", "--out", str(out)]
    process = start(str(problems), str(solutions), *options, stdout=subprocess.DEVNULL)
    wait_for_lines(out, 6, process)
    process.kill()  # the processes that it has started must notice that
    process.wait()
    end = monotonic() + 10
    while processes_of(process.pid):
        assert monotonic() < end
        sleep(0.05)
    before = [json.loads(line)["file"] for line in out.read_text().splitlines()]
    assert 6 <= len(before) < 12
    with out.open("a") as file:
        file.write('{"problem": "2_Re')  # of a run that is killed while it writes
    status = command.main([str(problems), str(solutions), *options, "--csv", str(table)])
    records = [json.loads(line) for line in out.read_text().splitlines()]
    names = [record["file"] for record in records]
    assert names[: len(before)] == before
    assert sorted(names) == sorted(str(solutions / name) for name in texts)
    assert status == 1
    for record in records:
        path = Path(record["file"])
        assert record["problem"] == path.stem
        assert record["verdict"] == ("wrong" if path.parent.name == "2" else "correct")
    assert table.read_text().count("\n") == 13
    output = capsys.readouterr().out
    assert f"{len(before)} verdicts are in {out}; {12 - len(before)} files are left\n" in output
    assert "9 of 12 correct; fast_0 0.75; fast_1 " in output
    assert command.main([str(problems), str(solutions), *options]) == 1  # nothing is left
    assert out.read_text().count("\n") == 12


@pytest.mark.slow
@pytest.mark.parametrize("devices", ["cpu", "cpu,cpu:0"])
def test_an_interrupt_ends_workers_without_a_traceback(devices, problems, tmp_path):
    solutions = make(tmp_path / "solutions", dict.fromkeys(NAMES, PLAIN))
    out = tmp_path / "out.jsonl"
    options = ["--devices", devices, "--out", str(out)]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    process = start(str(problems), str(solutions), *options, **streams)
    wait_for_lines(out, 1, process)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    text, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in text
    assert text.endswith("referee: interrupted\n")
    sleep(1)  # for those that have been killed and are still on their way out
    assert not processes_of(process.pid)


def processes_of(group: int) -> list[str]:
    """Return the commands of a group's processes that still run."""
    line = ["ps", "-eo", "pgid=,stat=,args="]
    rows = subprocess.check_output(line, text=True).splitlines()
    fields = [row.split(maxsplit=2) for row in rows]
    return [args for number, state, args in fields if int(number) == group and state[0] != "Z"]


@pytest.mark.slow
def test_workers_of_several_devices_grade_every_file_once(problems, tmp_path):
    solutions = make(tmp_path / "solutions", dict.fromkeys(NAMES, PLAIN))
    out = tmp_path / "out.jsonl"
    devices = "cuda:0,cuda:1" if torch.cuda.device_count() > 1 else "cpu,cpu:0"
    options = ["--devices", devices, "--trials", "3", "--out", str(out)]
    assert command.main([str(problems), str(solutions), *options]) == 0
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert sorted(record["problem"] for record in records) == sorted(n[:-3] for n in NAMES)
