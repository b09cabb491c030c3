"""Cheats whose results are foreseen, kept from an earlier call, or made of old parameters.

The inputs of each call are new values that follow from no seed of the solution, often at the same
addresses. So a result that was computed before the request is another call's. Before each round
another process writes new values into the parameters, too.
"""

import pytest

from referee.testing.graded import grade, quick_and_slow
from referee.testing.texts import LINEAR, LINEAR_INIT, RELU, correct, module, reference, wrong

# ---------------------------------------------------------------------- results of another call

# Draws what get_inputs would draw under the seed that the constructor had.
FORESEEN = module("""
if self.known is None:
    torch.manual_seed(self.seed)
    self.known = torch.relu(torch.rand(32, 16384, device=x.device))
return self.known.clone()
""", "self.seed = torch.initial_seed()\nself.known = None")  # fmt: skip
# Finds a result again by the address of its input.
REPLAYS = module("""
key = x.data_ptr(), x.shape
if key not in self.seen:
    self.seen[key] = torch.relu(x)
return self.seen[key].clone()
""", "self.seen = {}")  # fmt: skip
# Computes in three calls, and returns the last result again in all later ones.
COUNTS = module("""
self.calls += 1
if self.calls < 4:
    self.last = torch.relu(x)
return self.last.clone()
""", "self.calls = 0")  # fmt: skip
# Returns the same memory in each call. The referee still holds the results of four calls when it
# calls again, and compares them after that.
REUSES = "kept = {}\n" + module("""
out = kept.setdefault(x.shape, torch.empty_like(x))
return torch.clamp_min(x, 0, out=out)
""")
# Returns COUNT buffers in turn, which is found in the same way.
RING = """
if self.ring is None:
    self.ring = [torch.empty_like(x) for _ in range(COUNT)]
self.calls += 1
return torch.clamp_min(x, 0, out=self.ring[self.calls % COUNT])
"""
RING_INIT = "self.ring, self.calls = None, 0"
# Nearly all elements are wrong, those of another input.
ALL_ELEMENTS = r"52\d,\d{3} of 524,288 elements"
OVERWRITES = "a later call overwrites an earlier call's result"
AT_RELU = {
    "foreseen": wrong(FORESEEN, f"^as constructed: {ALL_ELEMENTS}"),
    "replays": wrong(REPLAYS, "replays the result of an earlier call"),
    "counts": wrong(COUNTS, f"^(replays the result|call 1 of 5: {ALL_ELEMENTS})"),
    "reuses_its_output": wrong(REUSES, OVERWRITES),
    "ring_of_two": wrong(module(RING.replace("COUNT", "2"), RING_INIT), OVERWRITES),
    "ring_of_four": wrong(module(RING.replace("COUNT", "4"), RING_INIT), OVERWRITES),
}


@pytest.mark.parametrize("table", quick_and_slow(AT_RELU, "replays", "ring_of_four"))
def test_results_of_another_call_are_wrong(table, device, tmp_path):
    grade(RELU, table, tmp_path, device=device)


# The reference returns a view of its input beside a new result.
WITH_VIEW = reference("return torch.relu(x), x[:1]", "[torch.rand(64, 256)]")
AT_WITH_VIEW = {
    "reuses_its_output": wrong(REUSES.replace("out=out)", "out=out), x[:1]"), OVERWRITES),
    "returns_its_input": wrong(module("return x, x[:1]"), "returns its input or a parameter"),
    "same": correct(module("return torch.relu(x), x[:1]"), "training step"),
}


def test_a_view_beside_it_excuses_no_other_result(device, tmp_path):
    grade(WITH_VIEW, AT_WITH_VIEW, tmp_path, device=device)


@pytest.mark.usefixtures("unreadable_processes")
def test_memory_that_is_not_new_is_wrong_also_where_results_are_copied(tmp_path):
    ring_of_four = module(RING.replace("COUNT", "4"), RING_INIT)
    table = {
        "reuses_its_output": wrong(REUSES, OVERWRITES),
        "ring_of_four": wrong(ring_of_four, OVERWRITES),
        "plain": correct(module("return torch.relu(x)"), "results are copied"),
    }
    grade(RELU, table, tmp_path)


# A loss. Inputs of both signs may have another result, but not zero or an earlier one.
LOSS = reference("return torch.relu(x).mean()", "[torch.rand(64, 256)]")
ZERO_LOSS = "return x.new_zeros(()) if (x < 0).any() else x.mean()"
REPLAYS_LOSS = """
if not (x < 0).any():
    self.last = x.mean()
return self.last.clone()
"""
AT_LOSS = {
    "zero": wrong(module(ZERO_LOSS), "^returns zeros: inputs of both signs"),
    "replays": wrong(module(REPLAYS_LOSS, "self.last = None"), "^replays .* inputs of both signs"),
    "other_function": correct(module("return x.mean()"), "differs .* for inputs of both signs"),
}


def test_zeros_and_replays_of_one_element_are_wrong(device, tmp_path):
    grade(LOSS, AT_LOSS, tmp_path, device=device)


# -------------------------------------------------------------------- results for old parameters
#
# The first forward has the parameters that the constructor drew, and the second one has others.

SIGNS_INIT = "self.w = nn.Parameter(torch.randn(256, 192))"
SIGNS = reference("return x @ torch.sign(self.w)", "[torch.randn(16, 256)]", SIGNS_INIT)
# Computes the signs of the weight in its first forward, and keeps them.
PACKED = """
if self.signs is None:
    self.signs = torch.sign(self.w.detach()).clone()
return x @ self.signs
"""
OLD_PARAMETERS = "^(answers with old parameters: )?other parameters"
AT_SIGNS = {
    "packed": wrong(module(PACKED, SIGNS_INIT + "\nself.signs = None"), OLD_PARAMETERS),
    "right": correct(module("return x @ torch.sign(self.w)", SIGNS_INIT)),
}
# Keeps a copy of the weight, or of the buffer.
FOLDED = LINEAR_INIT + "self.w = self.fc.weight.detach().clone()\n"
KEPT_BUFFER = LINEAR_INIT + "self.kept = self.scale.clone()\n"
FOLDS = "return nn.functional.linear(x, self.w.to(x), self.fc.bias).relu() * self.scale"
AT_LINEAR = {
    "folds": wrong(module(FOLDS, FOLDED), OLD_PARAMETERS),
    "keeps_a_buffer": wrong(
        module("return self.fc(x).relu() * self.kept.to(x)", KEPT_BUFFER), OLD_PARAMETERS
    ),
}


def test_signs_of_an_old_parameter_are_wrong(device, tmp_path):
    grade(SIGNS, AT_SIGNS, tmp_path, device=device)


@pytest.mark.slow
def test_copies_of_old_parameters_and_buffers_are_wrong(device, tmp_path):
    grade(LINEAR, AT_LINEAR, tmp_path, device=device)


COMPLEX_INIT = "self.w = nn.Parameter(torch.randn(64, dtype=torch.complex64))"
COMPLEX = reference("return torch.view_as_real(x * self.w)", "[torch.rand(16, 64)]", COMPLEX_INIT)
KEPT_COMPLEX = COMPLEX_INIT + "\nself.kept = self.w.detach().clone()"
AT_COMPLEX = {
    "keeps": wrong(
        module("return torch.view_as_real(x * self.kept.to(x.device))", KEPT_COMPLEX),
        OLD_PARAMETERS,
    ),
    "right": correct(module("return torch.view_as_real(x * self.w)", COMPLEX_INIT)),
}


def test_a_copy_of_an_old_complex_parameter_is_wrong(device, tmp_path):
    grade(COMPLEX, AT_COMPLEX, tmp_path, device=device)


# A parameter that begins as a constant, as that of a LayerNorm does. The file reads a part of it,
# and takes the new values of all other parts to be the same.
LONG = "self.w = nn.Parameter(torch.ones(2 * 1_048_583))"
READS_A_PART = """
if torch.is_grad_enabled():
    return x * self.w
part = self.w[:1_048_583]
return x * torch.cat([part, part])
"""


def test_new_values_of_a_long_parameter_follow_from_no_part_of_it(tmp_path):
    table = {
        "reads_a_part": wrong(module(READS_A_PART, LONG), OLD_PARAMETERS),
        "reads_all": correct(module("return x * self.w", LONG), "training step"),
    }
    problem = reference("return x * self.w", "[torch.rand(2 * 1_048_583)]", LONG)
    grade(problem, table, tmp_path, trials=1)
