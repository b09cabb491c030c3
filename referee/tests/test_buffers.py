"""Buffers that the reference's forward changes: a solution's must be changed in the same way."""

import pytest
import torch
from torch import nn

from referee.reference.module import _restored_buffers
from referee.testing.graded import grade, quick_and_slow
from referee.testing.texts import correct, module, reference, wrong

NORM = "self.norm = nn.BatchNorm1d(64)"
FORWARD = "return self.norm(x)"
PROBLEM = reference(FORWARD, "[torch.rand(32, 64)]", NORM)
# Normalizes by itself; the running statistics keep their old values.
NORMALIZES = (
    "return nn.functional.batch_norm(x, None, None, self.norm.weight, self.norm.bias, True)"
)
# Updates them only where autograd does not record, or only where it does.
ONLY_FORWARDS = f"if not torch.is_grad_enabled():\n    {FORWARD}\n{NORMALIZES}"
ONLY_STEPS = f"if torch.is_grad_enabled():\n    {FORWARD}\n{NORMALIZES}"
# Updates the statistics, but does not count.
DOES_NOT_COUNT = """
norm = self.norm
mean, variance = norm.running_mean, norm.running_var
return nn.functional.batch_norm(x, mean, variance, norm.weight, norm.bias, training=True)
"""
# The variance is that of the batch, without the factor 32 / 31 with which torch estimates it.
ANOTHER_VARIANCE = """
norm = self.norm
norm.num_batches_tracked += 1
norm.running_mean.lerp_(x.detach().mean(0), 0.1)
norm.running_var.lerp_(x.detach().var(0, correction=0), 0.1)
return nn.functional.batch_norm(x, None, None, norm.weight, norm.bias, training=True)
"""
# Computes new statistics by itself, and assigns them: the module then has other tensors.
ASSIGNS = """
norm = self.norm
norm.num_batches_tracked = norm.num_batches_tracked + 1
norm.running_mean = 0.9 * norm.running_mean + 0.1 * x.detach().mean(0)
norm.running_var = 0.9 * norm.running_var + 0.1 * x.detach().var(0)
return nn.functional.batch_norm(x, None, None, norm.weight, norm.bias, training=True)
"""
OTHER_NAMES = "self.bn = nn.BatchNorm1d(64)"
# Buffers that the reference has not, one of which changes in each forward.
MORE_BUFFERS = """
self.norm = nn.BatchNorm1d(64)
self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
self.register_buffer("table", torch.arange(64.0))
"""
NOT_UPDATED = "its buffer norm.running_mean is not what the reference's forward makes of it"
TABLE = {
    "normalizes": wrong(module(NORMALIZES, NORM), f"^a forward: {NOT_UPDATED}"),
    "only_forwards": wrong(module(ONLY_FORWARDS, NORM), f"^a training step: {NOT_UPDATED}"),
    "only_steps": wrong(module(ONLY_STEPS, NORM), f"^a forward: {NOT_UPDATED}"),
    "does_not_count": wrong(module(DOES_NOT_COUNT, NORM), "buffer norm.num_batches_tracked is"),
    "another_variance": wrong(module(ANOTHER_VARIANCE, NORM), "buffer norm.running_var is"),
    "same": correct(module(FORWARD, NORM), "training step"),
    "assigns": correct(module(ASSIGNS, NORM), "training step"),
    "other_names": correct(module("return self.bn(x)", OTHER_NAMES), "training step"),
    "more_buffers": correct(module(f"self.calls += 1\n{FORWARD}", MORE_BUFFERS), "training step"),
}


def test_a_forward_of_the_reference_leaves_buffers_that_it_replaces_as_they_were():
    """Other roundings of a result are computed in such a block."""
    layer = nn.BatchNorm1d(4)
    mean = layer.running_mean
    before = mean.clone()
    with _restored_buffers(layer):
        layer.running_mean = layer.running_mean + 1
        mean.add_(1)
    assert layer.running_mean is mean
    assert torch.equal(mean, before)


@pytest.mark.parametrize("table", quick_and_slow(TABLE, "normalizes", "assigns"))
def test_buffers_that_the_reference_changes_are_compared(table, device, tmp_path):
    grade(PROBLEM, table, tmp_path, device=device)
