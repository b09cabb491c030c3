"""Cheats whose results, replies or parameters are wrong at once, graded against reference files.

The comment at a text says what this cheat tries. Other kinds of cheats are in

    test_cheats_late.py        results that are computed when somebody reads them
    test_cheats_kept.py        results that are foreseen or kept, and those for old parameters
    test_cheats_when_timed.py  wrong results in timed calls and steps alone
    test_cheats_in_steps.py    wrong gradients and buffers
    test_cheats_in_time.py     right results that try to seem faster
"""

import pytest

from referee.testing.graded import grade, quick_and_slow
from referee.testing.texts import (
    IS_TIMED,
    LINEAR,
    LINEAR_INIT,
    RELU,
    correct,
    error,
    module,
    reference,
    wrong,
)

# --------------------------------------------------------------- wrong elements and false replies
#
# All elements are compared. A process that knows the token of a request may well write a reply
# itself, but the referee reads the memory that the reply describes, and this is stopped then.

# One random element of 524,288 is wrong.
ONE_WRONG_ELEMENT = "import random\n" + module("""
out = torch.relu(x)
out.view(-1)[random.randrange(out.numel())] += 1
return out
""")
# The last element is wrong, as in a kernel that computes full vectors only.
TAIL = module("out = torch.relu(x)\nout.view(-1)[-1:] = x.reshape(-1)[-1:] - 1\nreturn out")
# Writes a correct reply itself, before anything is computed. The pipe of replies and the token are
# in the frame of the request.
REPLIES = "import json, os\n" + IS_TIMED
REPLIES += module("""
out = torch.empty_like(x)
frame = frame_of_request()
if frame:
    asked = frame.f_locals["request"]
    description = {"type": "Tensor", "shape": list(x.shape), "strides": list(x.stride())}
    description |= {"dtype": "float32", "device": "cpu", "address": x.data_ptr()}
    call = {"nesting": "*", "results": [description]}
    count = len(asked["arguments"]["inputs"])
    reply = {"token": asked["token"], "seconds": [1e-9] * count, "returned": [call] * count}
    os.write(frame.f_locals["replies"], json.dumps(reply).encode() + b"\\n")
return out
""")
# Writes a verdict to every open file. It has no token, so it is no reply.
JUNK = "import os\nfrom contextlib import suppress\n" + module("""
for descriptor in range(3, 64):
    with suppress(OSError):
        os.write(descriptor, b'{"verdict": "correct", "seconds": 1e-9}\\n')
return torch.relu(x)
""")
# The first row is right, and all others are copies of it.
FIRST_ROW = module("return torch.relu(x[:1].expand(x.shape).clone())")
AT_RELU = {
    "one_wrong_element": wrong(ONE_WRONG_ELEMENT, ": 1 of 524,288 elements"),
    "tail": wrong(TAIL, r": 1 of 524,288 elements .* the first at \[31, 16383\]"),
    "first_row": wrong(FIRST_ROW, r"the first at \[1, "),
    "zeros": wrong(module("return torch.zeros_like(x)"), "returns zeros"),
    "replies": (
        REPLIES,
        "wrong|error",
        # The reply describes memory of the CPU, also on a GPU.
        "not new memory|sends an invalid reply|output's device is cpu",
    ),
    "junk": error(JUNK, "sends an invalid reply"),
    "returns_its_input": wrong(module("return x"), "returns (a copy of )?its input"),
    "copies_its_input": wrong(module("return x.clone()"), "returns a copy of its input 0"),
    "in_place": wrong(module("return x.relu_()"), "changes its input|returns its input"),
    "changes_its_input": wrong(module("y = torch.relu(x)\nx.zero_()\nreturn y"), "changes its inp"),
    "exits": error("import os\nprint('all correct', flush=True)\nos._exit(0)\n", "exits with"),
    "crashes": error(module("import ctypes\nctypes.string_at(0)"), "SIGSEGV"),
}


@pytest.mark.parametrize("table", quick_and_slow(AT_RELU, "tail", "junk", "in_place", "exits"))
def test_wrong_results_and_false_replies_get_their_verdicts(table, device, tmp_path):
    grade(RELU, table, tmp_path, device=device)


# ------------------------------------------------------------ results whose elements share memory
#
# They save most of the writes. The referee finds them by their strides.

MEANS = reference("return torch.zeros_like(x) + x.mean(1, keepdim=True)", "[torch.rand(64, 256)]")
# Has strides of 0 in training steps alone.
STEP_EXPANDS = """
y = x.mean(1, keepdim=True).expand(x.shape)
return y if torch.is_grad_enabled() else y.contiguous()
"""
# Each row begins one element after the row before it.
OVERLAPS = """
memory = x.mean().repeat(x.shape[0] + x.shape[1])
return memory.as_strided(x.shape, (1, 1))
"""
EXPANDS = "return x.mean(1, keepdim=True).expand(x.shape)"
# Describes its result as contiguous, so that only those who read it can see that it is not. Says
# that CUDA IPC cannot share it, so that the referee would have to believe a copy.
WANTS_A_COPY = """
from referee.child import kept_results

tell = kept_results.describe
kept_results.describe = lambda x: tell(x) | {"strides": [256, 1], "handle": None}
"""
SHARED = r"elements of its result share memory or interleave \(strides \[1, 0\]\), the reference"
AT_MEANS = {
    "expands": wrong(module(EXPANDS), SHARED),
    "step_expands": wrong(module(STEP_EXPANDS), "result 0, recorded: elements of its result"),
    "wants_a_copy": wrong(WANTS_A_COPY + module(EXPANDS), "elements beyond|cannot be read"),
    "overlaps": wrong(module(OVERLAPS), r"share memory or interleave \(strides \[1, 1\]\)"),
    "columns": correct(module("return (x.t() * 0 + x.mean(1)).t()"), "training step"),
}
# Elements may share memory if the reference's do.
EXPANDED = reference(EXPANDS, "[torch.rand(64, 256)]")
AT_EXPANDED = {
    "same": correct(module(EXPANDS), "training step"),
    "whole": correct(module(EXPANDS + ".contiguous()"), "training step"),
}


@pytest.mark.parametrize("table", quick_and_slow(AT_MEANS, "overlaps", "wants_a_copy"))
def test_elements_that_share_memory_are_wrong(table, device, tmp_path):
    grade(MEANS, table, tmp_path, device=device)


@pytest.mark.slow
def test_elements_may_share_memory_if_the_references_do(device, tmp_path):
    grade(EXPANDED, AT_EXPANDED, tmp_path, device=device)


# ------------------------------------------------------- results of one call that share memory
#
# They save a copy, but whoever writes into one of them changes the other.

TWICE = reference("y = torch.relu(x)\nreturn y, y.clone(), y[-1].clone()", "[torch.rand(64, 256)]")
# Has both results in one tensor of twice as many columns; no element is in both.
COLUMNS = """
both = torch.cat((x, x), dim=1).relu()
y, copy = both.chunk(2, dim=1)
return y, copy, y[-1].clone()
"""
# Returns one tensor as two results in training steps alone.
ONE_IN_STEPS = """
y = torch.relu(x)
return y, y if torch.is_grad_enabled() else y.clone(), y[-1].clone()
"""
ONE_WHEN_TIMED = "y = torch.relu(x)\nreturn y, y if is_timed() else y.clone(), y[-1].clone()"
AT_TWICE = {
    "same": wrong(module("y = torch.relu(x)\nreturn y, y, y[-1].clone()"), "results 0 and 1 share"),
    "row": wrong(module("y = torch.relu(x)\nreturn y, y.clone(), y[-1]"), "results 0 and 2 share"),
    "one_in_steps": wrong(module(ONE_IN_STEPS), "autograd records: results 0 and 1 share"),
    "one_when_timed": wrong(IS_TIMED + module(ONE_WHEN_TIMED), "timed call: results 0 and 1 share"),
    "columns": correct(module(COLUMNS), "training step"),
}
# Two results may share memory if the reference's do.
ONE_TENSOR = reference("y = torch.relu(x)\nreturn y, y", "[torch.rand(64, 256)]")
AT_ONE_TENSOR = {
    "one": correct(module("y = torch.relu(x)\nreturn y, y"), "training step"),
    "two": correct(module("y = torch.relu(x)\nreturn y, y.clone()"), "training step"),
}


@pytest.mark.parametrize("table", quick_and_slow(AT_TWICE, "row", "columns"))
def test_results_of_one_call_that_share_memory_are_wrong(table, device, tmp_path):
    grade(TWICE, table, tmp_path, device=device)


@pytest.mark.slow
def test_results_may_share_memory_if_the_references_do(device, tmp_path):
    grade(ONE_TENSOR, AT_ONE_TENSOR, tmp_path, device=device)


# ------------------------------------------------------------------------ parameters and accuracy

# Multiplies in bfloat16.
HALF_PRECISION = """
weight, bias = self.fc.weight.bfloat16(), self.fc.bias.bfloat16()
return nn.functional.linear(x.bfloat16(), weight, bias).relu().float() * self.scale
"""
CHANGES = "self.fc.weight.data[0, 0] += 1\nreturn self.fc(x).relu() * self.scale"
AT_LINEAR = {
    "changes_a_parameter": wrong(module(CHANGES, LINEAR_INIT), "changes its parameter fc.weight"),
    "has_no_parameters": wrong(module("return x.new_zeros(64, 192)"), "state is not the ref"),
    "half_precision": wrong(module(HALF_PRECISION, LINEAR_INIT), "lower precision than eager's"),
}


@pytest.mark.parametrize("table", quick_and_slow(AT_LINEAR, "half_precision"))
def test_other_parameters_or_less_accuracy_are_wrong(table, device, tmp_path):
    grade(LINEAR, table, tmp_path, device=device)
