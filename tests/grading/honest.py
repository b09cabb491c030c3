"""Honest solutions of the two problems, as short texts: grading must find them correct.

Longer honest solutions are files of `solutions/`. `test_solutions.py` grades all of them, and
`test_reference_files.py` some.
"""

import run
from referee.testing.texts import module
from tests.support.processes import ROOT

SOLUTIONS = ROOT / "tests" / "grading" / "solutions"


def linear(forward: str, init: str = "self.linear = nn.Linear(i, o)\nself.divisor = d") -> str:
    """Return the text of a module with the constructor of the linear problem's reference."""
    return module(forward, init, ", i, o, d")


PLAIN = module("return torch.relu(x)")
PLAIN_LINEAR = linear("return torch.relu(self.linear(x)) / self.divisor")

AOT = 'self.compiled = torch.compile(torch.relu, backend="aot_eager", dynamic=True)'
INDUCTOR = "self.compiled = torch.compile(torch.relu)"  # compiles anew for some shapes
SCRIPTED = """
class Relu(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.clamp(x, min=0)

def ModelNew() -> nn.Module:
    return torch.jit.script(Relu())
"""
OTHER_NAMES_INIT = """
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
    "honest_plain": PLAIN,
    "honest_compiled": module("return self.compiled(x)", AOT),
    "honest_inductor": module("return self.compiled(x)", INDUCTOR),
    "honest_scripted": SCRIPTED,
    "honest_plain_linear": PLAIN_LINEAR,
    "honest_other_names": linear(OTHER_NAMES, OTHER_NAMES_INIT),
    "ours": run.OUR_SOLUTION,
}
