"""Yardsticks: what is compiled, and what eager's process keeps of them."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from referee.call_names import COMPILED, COPY
from referee.child import yardsticks
from referee.child.request_handler import RequestHandler
from referee.child.yardsticks import YardstickMaker
from referee.eager_processes import EagerProcesses


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
