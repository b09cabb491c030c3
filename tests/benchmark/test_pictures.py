"""Pictures: sweeps, README's bars, and results of which none is drawn."""

import importlib.util
import json
import re
from itertools import product
from pathlib import Path
from xml.etree import ElementTree

import pytest

import run
from problems import linear_relu_divide as linear
from problems import relu
from problems.benchmark import bars
from referee.report import plot
from referee.verdict_words import LEFT_OUT
from tests.support.made_up_results import DTYPES, HEADLINE, document, record


def draw(content: dict, folder: Path, suffix: str = ".svg", draw_file=plot.main) -> Path:
    """Draw a file's content, a sweep unless `draw_file` is of `bars`; return the picture's path."""
    data = folder / "results.json"
    path = folder / f"picture{suffix}"
    data.write_text(json.dumps(content))
    assert draw_file([str(data), str(path)]) == 0
    return path


def test_a_plot_of_a_sweep_has_all_contestants_and_the_roofline(tmp_path):
    pytest.importorskip("matplotlib")
    found = []
    for kind, rows in product((relu, linear), (4, 16, 64)):
        found.append(record(kind, "float16"))
        limit = 1e-3 if rows > 4 else None  # as in a series that was interrupted
        found[-1]["runs"][0]["forward"] |= {"work": 1000 * rows, "roofline_seconds": limit}
    content = document([*found, record(linear, word=LEFT_OUT, reason="needs more")], "sweep")
    assert draw(content, tmp_path, ".png").read_bytes().startswith(b"\x89PNG")
    text = draw(content, tmp_path).read_text()
    assert text.encode() == plot.draw(content, ".svg")  # the same for the same data
    ElementTree.fromstring(text)
    for word in ("ModelNew", "torch.compile", "copy", "product alone", "roofline", "TFLOP/s"):
        assert f"<!-- {word} -->" in text
    assert "(again)" not in text
    content["environment"] = {**content["environment"], "threads": 2}
    text = draw(content, tmp_path).read_text()  # a CPU exceeds a large copy, so that is no roofline
    assert (text.count("<!-- large copy -->"), text.count("<!-- roofline -->")) == (1, 1)


def test_the_texts_of_the_picture_are_those_of_the_data(tmp_path):
    pytest.importorskip("matplotlib")
    found = [record(kind, d, ratio=2.0 if kind is relu else 4.0) for kind, d in HEADLINE]
    text = draw(document(found), tmp_path, draw_file=bars.main).read_text()
    ElementTree.fromstring(text)
    shown = [word for d in DTYPES for word in ("ModelNew", f"{d}, 1.500 ms")]
    for setting in ("highest", "high", "float16"):
        shown += ["LinearReluDivideNew", f"{setting}, 0.750 ms"]
    shown += ["1.000"] * 6 + ["1.200"] * 6 + ["2.000"] * 3 + ["4.000"] * 3
    shown += ["eager", "torch.compile", "this project", "Speed over eager on a | GPU, torch 2.13"]
    assert re.findall("<!-- (.+?) -->", text) == shown


@pytest.mark.parametrize("fault", ["wrong", "missing", "no json", "[]", '{"schema": 0}'])
def test_no_picture_is_drawn_of_wrong_or_missing_results_or_of_other_files(fault, tmp_path, capsys):
    found = [record(*key) for key in HEADLINE]
    found[1]["verdict"] = fault
    if fault == "missing":
        del found[1]
    data = tmp_path / "a.json"
    path = tmp_path / "a.svg"
    is_ours = fault in ("wrong", "missing")
    data.write_text(json.dumps(document(found)) if is_ours else fault)
    assert bars.main([str(data), str(path)]) == 2
    assert not path.exists()
    reason = "no correct result of relu float16\n" if is_ours else f"{data} is no"
    assert capsys.readouterr().err.startswith(f"problems.benchmark.bars: {reason}")


def test_a_comparison_is_no_sweep(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    data = tmp_path / "a.json"
    data.write_text(json.dumps(document([record(relu)])))
    assert plot.main([str(data), str(tmp_path / "a.svg")]) == 2
    assert capsys.readouterr().err == "referee.report.plot: these are no results of --sweep\n"


def test_a_plot_without_matplotlib_is_refused(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit) as stopped:
        run.main(["relu", "--plot", str(tmp_path / "a.svg")])
    assert stopped.value.code == 2
    reason = "argument --plot: drawing needs matplotlib: pip install matplotlib"
    assert capsys.readouterr() == ("", f"run.py: {reason}\n")
