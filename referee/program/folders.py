"""Grades folders of solutions against folders of references.

    find_work    pairs solutions with references by their names, see `pairs`; reads all files
    grade        grades them, see `folder_workers`; prints and appends verdicts

`report.folder_table` makes the table and the scores at the end.

With `--out FILE` each verdict is appended as a line of JSON when it comes, and the same command,
given again, grades only the files that have no line yet.
"""

import argparse
import json
import os
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch

from referee import console, records
from referee.engine import read_files
from referee.grading import Options
from referee.message_lines import printable
from referee.program.file_queue import Task
from referee.program.folder_workers import grade_tasks
from referee.program.pairs import absolute, pair
from referee.report import files, folder_table, graded_files
from referee.verdict_words import CORRECT

# A line of `--out` has at least these keys, and "problem" is the first.
RECORD_KEYS = {"problem", "file", "verdict", "reason", "runs"}
RECORD_START = b'{"problem": '
OTHER_OUT = "--out is for another file, a new one or one that it wrote"


@dataclass(frozen=True)
class Job:
    """All the work of a command.

    Attributes:
        args: the command's options.
        earlier_records: the records that an earlier command has left in `--out`.
        tasks: the problems that have solutions without a verdict.
        unpaired: solutions without a reference.
    """

    args: argparse.Namespace
    earlier_records: list[dict]
    tasks: list[Task]
    unpaired: list[Path]

    @property
    def files_left(self) -> int:
        """The number of files that have no verdict yet."""
        return sum(len(task.solutions) for task in self.tasks)

    @property
    def file_count(self) -> int:
        """The number of files that have a reference."""
        return len(self.earlier_records) + self.files_left


def are_named(args: argparse.Namespace) -> bool:
    """Return whether the command's reference is a folder."""
    return bool(args.reference) and args.reference.is_dir()


def find_work(args: argparse.Namespace) -> Job:
    """Pair the solutions with references, read them, and leave out those that have a verdict.

    Raises:
        ValueError: `--out` names a file of something else, or a file cannot be read.
    """
    paired, unpaired = pair(args.reference, args.solution)
    earlier_records = read_out(args.out) if args.out else []
    graded = {(record["problem"], absolute(record["file"])) for record in earlier_records}
    return Job(args, earlier_records, _make_tasks(paired, args.reference, graded), unpaired)


def _make_tasks(
    paired: dict[Path, list[Path]], references: Path, graded: set[tuple[str, str]]
) -> list[Task]:
    """Return a task for each reference that has ungraded solutions; read these files.

    Args:
        paired: the solutions of each reference.
        references: the folder.
        graded: problem and absolute path of each solution that has a verdict.

    Raises:
        ValueError: a file cannot be read.
    """
    tasks = []
    for reference, solutions in paired.items():
        name = reference.relative_to(references).with_suffix("").as_posix()
        ungraded = [path for path in solutions if (name, absolute(path)) not in graded]
        if not ungraded:
            continue
        try:
            text = reference.read_bytes()
            tasks.append(Task(name, reference, text, read_files(ungraded)))
        except OSError as error:
            raise ValueError(f"cannot read {error.filename}: {error.strerror}") from None
    return tasks


def grade(
    job: Job,
    devices: list[torch.device],
    options: Options,
    document: dict,
    progress: console.Progress,
) -> int:
    """Grade folders; return the exit status.

    It is 0 if every solution has a reference and is correct, and all results could be written.

    Args:
        job: the work, see `find_work`.
        devices: where solutions compute. Several devices have a worker each.
        options: how files are graded.
        document: the JSON file's content; all records are added to it.
        progress: shows what is done now.
    """
    document["records"] += job.earlier_records
    all_records = document["records"]  # grows with each verdict
    _announce(job)
    try:
        with closing(grade_tasks(job.tasks, devices, options, progress)) as new_records:
            for record in new_records:
                progress.clear()
                all_records.append(record)
                if job.args.out:
                    _append(job.args.out, record)
                console.show(_describe(record, len(all_records), job.file_count))
    finally:  # after an interrupt, too
        progress.clear()
        document["complete"] = len(all_records) == job.file_count
        is_written = _report(job.args, document)
    if not document["complete"]:
        console.say(f"{job.file_count - len(all_records)} files have no verdict")
    are_correct = all(record["verdict"] == CORRECT for record in all_records)
    is_success = are_correct and document["complete"] and is_written and not job.unpaired
    return 0 if is_success else 1


def _announce(job: Job) -> None:
    """Print which files are not graded: those without a reference, and those with a verdict."""
    for path in job.unpaired:
        console.say(f"{path}: no reference has its name or number; not graded")
    verdict_count = len(job.earlier_records)
    if verdict_count:
        left = f"{job.files_left} files are left"
        console.show(f"{verdict_count} verdicts are in {job.args.out}; {left}")


def _report(args: argparse.Namespace, document: dict) -> bool:
    """Print the summary, and write the files that the options name.

    Returns:
        Whether all of them could be written.
    """
    all_records = document["records"]
    are_written = []
    if all_records:
        console.show(f"\n{folder_table.summary(all_records)}")
        if args.csv:
            are_written.append(files.try_to_write(args.csv, folder_table.as_csv(all_records)))
    if args.json:
        are_written.append(files.try_to_write(args.json, records.as_json(document)))
    return all(are_written)


def _append(path: Path, record: dict) -> None:
    """Append a record to a file as one line; return when it is on the disk.

    If that fails, the program ends: later verdicts would be lost, too.
    """
    try:
        with path.open("a") as file:
            file.write(json.dumps(record) + "\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        console.say(f"cannot write {path}: {error.strerror}")
        raise SystemExit(1) from None


def read_out(path: Path) -> list[dict]:
    """Return the records that an earlier command has appended to a file.

    If that command was killed while it wrote, the file ends with a part of a line. This function
    then cuts that part off the file.

    Raises:
        ValueError: the file holds something else; it is not changed.
    """
    if not path.exists():
        return []
    *lines, unfinished_line = path.read_bytes().split(b"\n")
    earlier_records = []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if not isinstance(record, dict) or not record.keys() >= RECORD_KEYS:
            raise ValueError(f"{path}, line {number}, is no verdict: {OTHER_OUT}")
        earlier_records.append(record)
    if not RECORD_START.startswith(unfinished_line[: len(RECORD_START)]):
        raise ValueError(f"{path} does not end with a verdict: {OTHER_OUT}")
    if unfinished_line:
        os.truncate(path, path.stat().st_size - len(unfinished_line))
    return earlier_records


def _describe(record: dict, number: int, count: int) -> str:
    """Return the text that is printed for a record, the `number`th of `count`."""
    return f"{number} of {count}: {printable(record['problem'])}: {graded_files.describe(record)}"
