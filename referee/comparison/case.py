"""The description of a case."""

from dataclasses import dataclass

import torch


@dataclass
class Case:
    """One forward of the solution that is compared with the reference's.

    Attributes:
        name: the case in messages. The report lists the part before the first comma, such as the
            kind of the inputs, if a solution refuses the case.
        inputs: the arguments of the forward.
        required: whether the solution must take the inputs; otherwise it may raise.
        fill_new_tensors: whether torch fills new tensors with NaN during the forward.
        is_recorded: whether autograd records the forward.
        may_differ: whether the solution may compute another function of these inputs, because it
            relies on how `get_inputs` draws.
    """

    name: str
    inputs: list
    required: bool = True
    fill_new_tensors: bool = False
    is_recorded: bool = False
    may_differ: bool = False


@dataclass
class OwnCase(Case):
    """One of a problem's own small cases, which also says what precedes the forward.

    Attributes:
        arguments: the constructor's arguments of a new module; None for the previous case's module.
        state: values for the module's parameters and buffers; None to keep the present ones,
            "other" to draw new ones.
        setting: the precision of float32 products, as in `Problem.settings`.
    """

    arguments: list | None = None
    state: list[torch.Tensor] | str | None = None
    setting: str = ""
