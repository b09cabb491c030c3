"""The line of a long message that says what failed; names and texts that cannot be printed."""

import pytest

from referee import console
from referee.message_lines import first_error_line, printable
from referee.program.file_grader import FileGrader
from referee.records import Subject
from referee.report import graded_files, markdown, tables

COMPILER = "Error building 'x': [1/2] c++ -c /a/main.cpp\nFAILED: main.o\n/a/b/"
ERROR = "main.cpp:3:5: error: expected ';' before '}' token"
NVCC = 'cuda.cu(12): error: identifier "foo" is undefined'
TEXTS = [
    ("one\ntwo", "one"),
    ("", ""),
    (f"Error building\n/a/{NVCC}\n", NVCC),
    (f"{COMPILER}{ERROR}\nninja: error: no", ERROR),
]


@pytest.mark.parametrize(("text", "line"), TEXTS)
def test_the_first_line_with_an_error_is_found(text, line):
    """If no line has a compiler's error, it is the first line."""
    assert first_error_line(text) == line


def test_a_text_stays_one_line_and_does_not_move_the_cursor():
    assert printable("a\nb\x1b[2K\udcff é") == r"a\nb\x1b[2K\udcff é"


FORGING_NAME = "a\nb.py: correct"
RECORD = {"file": FORGING_NAME, "verdict": "wrong", "reason": "", "accuracy": "", "runs": []}


def test_a_files_name_forges_no_verdict():
    assert graded_files.describe(RECORD) == r"a\nb.py: correct: wrong"
    assert r"a\nb.py: correct  " in graded_files.ranking([RECORD])


def test_a_files_name_forges_no_row_of_a_markdown_table():
    content = {
        "environment": {"device": "CPU", "threads": 2, "torch": "2.9", "cuda": None},
        "command": "python -m referee 'a\n| b.py | correct |'",
        "date": "2026-01-01",
        "complete": True,
        "kind": "grading",
        "records": [{**RECORD, "file": "a\n| \x1b[2Kb.py | correct |"}],
    }
    origin, empty, _, _, *rows = markdown.as_markdown(content).splitlines()
    assert "`python -m referee 'a\\n| b.py | correct |'`" in origin
    assert empty == ""
    assert rows == [r"| `a\n\| \x1b[2Kb.py \| correct \|` | wrong |  |  |  |  |"]


@pytest.mark.parametrize("erase", ["", "\r\x1b[K"], ids=["in a file", "on a terminal"])
def test_a_files_name_forges_no_line_of_progress(erase, monkeypatch, capsys):
    monkeypatch.setattr(console, "_erase_line", lambda: erase)
    console.Progress()(f"{FORGING_NAME}\x1b[2K: checking", "draw 2")
    end = "" if erase else "\n"
    expected = r"a\nb.py: correct\x1b[2K: checking draw 2"
    assert capsys.readouterr().err == f"{erase}{expected}{end}"


def test_a_problems_name_forges_no_headline():
    grader = FileGrader([], [], None, None, None, "cpu: CPU", {}, None, is_verbose=False)
    subject = Subject(FORGING_NAME, "float32", (8, 64), note="a note")
    headline = r"a\nb.py: correct: cpu: CPU; [8, 64] float32; no walls"
    walls = tables.walls_in_words(has_walls=False)
    assert grader.headline_of(subject, walls).splitlines() == [headline, "a note"]


def test_what_a_file_prints_does_not_move_the_cursor():
    assert tables.indented("\x1b[1Ab.py: correct\r\n\tx\n") == (
        "    \\x1b[1Ab.py: correct\n            x"
    )
