"""Files that grading must find correct; tests/solutions has the longer ones."""

import run
from referee.tests.texts import module
from tests.support.grading import PLAIN, PLAIN_LINEAR, linear
from tests.support.processes import ROOT

SOLUTIONS = ROOT / "tests" / "solutions"

AOT = 'self.compiled = torch.compile(torch.relu, backend="aot_eager", dynamic=True)'
INDUCTOR = "self.compiled = torch.compile(torch.relu)"  # compiles anew for some shapes
SCRIPTED = """
class Relu(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.clamp(x, min=0)

def ModelNew() -> nn.Module:
    return torch.jit.script(Relu())
"""
NAMES = """
own = nn.Linear(i, o)
self.w = own.weight
self.b = own.bias
self.divisor = d
self.register_buffer("zero", torch.zeros(()), persistent=False)
"""
OTHER_NAMES = """
z = torch.einsum("...k,nk->...n", x, self.w) + self.b
return torch.maximum(z, self.zero).div_(self.divisor)
"""
# By name, the text of a file, or the path of this project's own solution.
HONEST = {
    "clean_plain": PLAIN,
    "clean_compiled": module("return self.compiled(x)", AOT),
    "clean_inductor": module("return self.compiled(x)", INDUCTOR),
    "clean_scripted": SCRIPTED,
    "clean_plain_linear": PLAIN_LINEAR,
    "clean_other_names": linear(OTHER_NAMES, NAMES),
    "ours": run.OUR_SOLUTION,
}
