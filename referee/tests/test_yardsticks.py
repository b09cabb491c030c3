"""Yardsticks: what is compiled, and what eager's process keeps of them."""

import base64
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from referee import engine
from referee.call_names import COMPILED, COPY
from referee.child import yardsticks
from referee.child.held_module import HeldModule
from referee.child.request_handler import RequestHandler
from referee.child.yardsticks import YardstickMaker
from referee.contestants.contestant import Contestant
from referee.contestants.pool import Pool
from referee.contestants.role import Role
from referee.eager_processes import EagerProcesses
from referee.grading import Options
from referee.reference.file import load
from referee.reference.problem import Problem
from referee.testing.texts import IMPORTS, RELU, module
from referee.tests.counters import until
from referee.times.round_limit import RoundLimit
from referee.verdict_words import CORRECT


def test_a_compiled_yardstick_is_ready_for_timed_forwards(monkeypatch):
    """They run without autograd, for which torch.compile makes a program of its own."""
    programs = []

    def backend(graph, _inputs):
        programs.append(graph)
        return graph.forward

    monkeypatch.setattr(
        yardsticks, "_compile", lambda module: torch.compile(module, backend=backend)
    )
    inputs = [torch.rand(3, 4)]
    maker = YardstickMaker(nn.Linear(4, 5), inputs, copied_bytes=16, problems_yardsticks=None)
    callables, notes = maker.make_all([COMPILED])
    assert not notes
    with torch.no_grad():
        callables[COMPILED](*inputs)
    assert len(programs) == 1


class EagersContestant:
    """Takes the place of eager's process; remembers what it was asked for."""

    def __init__(self) -> None:
        self.asked = []

    def ask(self, method: str, **arguments: object) -> dict:
        self.asked.append(method)
        return {"names": arguments.get("names"), "notes": []}


@pytest.fixture
def eager(monkeypatch):
    """Return eager's processes, which have set up a copy and torch.compile's program."""
    problem = SimpleNamespace(setting="", precision="highest", yardstick_file=None, moved_bytes=8)
    memory = SimpleNamespace(input_locations=lambda _: [])
    eager = EagerProcesses(problem, server=None, memory=memory, kept_process=None)
    eager.members = [EagersContestant()]
    eager.prepare_yardsticks((COPY, COMPILED))
    eager.members[0].asked.clear()
    return eager


def test_yardsticks_that_are_kept_are_not_made_again(eager):
    """Making torch.compile's program takes seconds."""
    eager.keep_yardsticks((COMPILED,))
    assert eager.yardsticks == [COMPILED]
    eager.prepare_yardsticks((COMPILED,))
    assert eager.members[0].asked == ["keep_yardsticks"]
    eager.prepare_yardsticks((COPY, COMPILED))  # as for the next file
    assert eager.members[0].asked[1:] == ["set_precision", "prepare_yardsticks"]


def test_a_new_process_of_eager_has_no_yardsticks_to_keep(eager):
    eager.take()
    eager.members = [EagersContestant()]
    eager.keep_yardsticks((COMPILED,))
    assert eager.members[0].asked == ["set_precision", "prepare_yardsticks"]
    assert eager.yardsticks == [COMPILED]


def test_a_process_frees_the_yardsticks_that_it_does_not_keep():
    handler = RequestHandler(mapping=None, device=torch.device("cpu"))
    handler._yardsticks = {COPY: torch.relu, COMPILED: torch.sin}
    handler.keep_yardsticks([COMPILED])
    assert handler._yardsticks == {COMPILED: torch.sin}


def test_a_kept_process_imports_the_next_problems_modules(tmp_path):
    """Files of both problems import a helper of the same name."""
    held = HeldModule(mapping=None, device=torch.device("cpu"))
    for number in (1, 2):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "helper_of_a_problem.py").write_text(f"class Model:\n    number = {number}\n")
        text = base64.b64encode(b"from helper_of_a_problem import Model").decode()
        held.import_file(text, str(folder / "p.py"), ["Model"], [])
        assert held._class.number == number
        held.forget()
        assert str(folder) not in sys.path


def test_a_process_goes_on_until_its_next_request():
    """`begin` returns at once; the next request waits for the method's end."""
    cpu = torch.device("cpu")
    pool = Pool(cpu)
    with engine.referee_at_work(separate_builds=True) as server:
        contestant = Contestant(server, pool, cpu, Role.EAGER)
        try:
            contestant.begin("release")
            until(lambda: contestant._pipes.has_unread_replies)
            assert contestant.ask("release") == {}
            contestant.begin("release")
            contestant.begin("release")
            assert contestant.ask("release") == {}
        finally:
            contestant.close()
            pool.close()


@pytest.mark.slow
def test_the_compiler_is_imported_while_the_solution_is(tmp_path, monkeypatch):
    asked = []
    own_ask, own_begin = Contestant.ask, Contestant.begin

    def ask(self, method, *arguments, **options):
        asked.append((self.pid, method))
        return own_ask(self, method, *arguments, **options)

    def begin(self, method):
        asked.append((self.pid, method))
        own_begin(self, method)

    monkeypatch.setattr(Contestant, "ask", ask)
    monkeypatch.setattr(Contestant, "begin", begin)
    reference_path, path = tmp_path / "reference.py", tmp_path / "solution.py"
    reference_path.write_text(IMPORTS + RELU)
    path.write_text(IMPORTS + module("return torch.relu(x)"))
    problem = Problem("problem", load(reference_path), torch.device("cpu"))
    options = Options(RoundLimit(3), 120.0, compiled=True)
    with engine.referee_at_work(separate_builds=True) as server:
        grader = engine.Engine(problem, server, options, lambda *_: None)
        try:
            [file] = engine.read_files([path])
            verdict = grader.grade(file)
        finally:
            grader.close()
    assert verdict.word == CORRECT, verdict.reason
    [times] = verdict.times
    assert len(times.forwards.seconds[COMPILED]) == 3
    assert len(times.steps.forward.seconds[COMPILED]) == 3
    methods = [method for _, method in asked]
    warm = methods.index("warm_compiler")
    assert methods[warm + 1] == "import_file"
    assert asked[warm][0] != asked[warm + 1][0]
