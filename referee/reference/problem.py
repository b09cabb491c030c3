"""A reference on a device: its inputs, its results, and how far off a solution's results may be.

`Problem` works with any reference file. A project that has more to say about its problem, such as
small cases, error limits or yardsticks, writes a subclass that overrides the methods in the part
"for a subclass to override".
"""

import copy
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import nn

from referee.call_names import COPY
from referee.comparison.case import OwnCase
from referee.comparison.reference_tensor import ReferenceTensor
from referee.contestants.autograd import differentiate, sources_of, with_gradient_leaves
from referee.contestants.descriptions import as_plain_tensor, flatten
from referee.contestants.forms import pack
from referee.contestants.free_memory import MAX_SHARE_OF_FREE, free_bytes
from referee.reference.file import ReferenceFile
from referee.reference.first_forward import check_state, run_first_forward
from referee.reference.float64 import find_float64_obstacle, run_in_float64, run_in_tf32
from referee.reference.input_source import InputSource, draw_first
from referee.reference.random_values import new_seed
from referee.reference.tf32 import operators_in_tf32
from referee.times.timings import LimitingRate, ReportNames, Timings

# If inputs, outputs and parameters take more than this share of a GPU's memory, not all contestants
# can keep memory for them at once: each gives back what it does not use.
LARGE_SHARE = 1 / 16
# Memory that forwards need, in multiples of the bytes of inputs, outputs and parameters together.
# Training steps need up to 5, and are left out if there is less.
NEEDED_MEMORY = 3


class StepArguments(NamedTuple):
    """A training step of the reference: a forward that autograd records, and its backward.

    Attributes:
        module: the reference's module.
        inputs: the arguments of the forward.
        output_gradients: the gradients of those outputs that hold floats.
        parameters: the names of the parameters whose gradients are computed.
        output_count: the number of outputs, floats or not.
        are_masked: whether the outputs' gradients are zero wherever rounding decides if a gradient
            passes, as in `Problem.where_gradients_pass`.
    """

    module: nn.Module
    inputs: list
    output_gradients: list[torch.Tensor]
    parameters: list[str]
    output_count: int
    are_masked: bool = False


class Problem:
    """A reference on a device.

    Args:
        name: the problem's name in reports.
        file: the reference.
        device: the device on which solutions compute.

    Attributes:
        setting: the one of `settings` that is graded now.
        arguments: the constructor's arguments.
        input_source: draws inputs; also has the indices of those that are tensors.
        shape: the shape of the only tensor among the inputs, or a tuple of all their shapes.
        dtype: the dtype of the first tensor among the inputs.
        input_bytes, parameter_bytes, output_bytes: the sizes of all inputs, of all parameters and
            buffers, and of all results.
        nesting, operators, terms, sharing_results, sharing_pairs, changed_buffers: see
            `first_forward.FirstForward`. If `file.has_own_cases`, no buffers are compared.
        float64_obstacle: why results are compared only with eager's, in words; None if results are
            compared with float64's, or if `file.has_own_cases`: a subclass then decides.

    `name`, `file` and `device` are attributes, too. A subclass may replace the class's attributes.

    Raises:
        BadReferenceError: the reference cannot be graded.
    """

    # The timed calls' names in reports.
    names = ReportNames(solution="ModelNew", eager="eager")
    # The kind of speed that limits the problem.
    limiting_rate = LimitingRate(unit="GB/s", work_unit="moved_bytes", yardstick=COPY)
    # The names of the calls that are timed beside eager, by the device's type, and which of them
    # take seconds to prepare. A quick check leaves these out.
    yardsticks = {"cpu": (COPY,), "cuda": (COPY,)}  # noqa: RUF012 - never changed
    slow_yardsticks: tuple[str, ...] = ()
    # The path of a file with the problem's own yardsticks, or None.
    yardstick_file = None
    # The precision settings of float32 products under which solutions are graded; "" is torch's
    # default, "highest". A sweep measures
    # only `some_settings`, unless that is empty.
    settings: tuple[str, ...] = ("",)
    some_settings: tuple[str, ...] = ()
    # True if gradients are compared with float64's; False if gradients must have eager's bits.
    needs_float64 = True

    def __init__(self, name: str, file: ReferenceFile, device: torch.device) -> None:
        self.name = name
        self.file = file
        self.device = _with_index(device)
        self.setting = ""
        self._examine()

    def _examine(self) -> None:
        """Run the reference for the first time; set the attributes that say what it is like."""
        file, device = self.file, self.device
        self.arguments = file.arguments()
        file.call_or_refuse("pickling its arguments", lambda: pack(self.arguments))
        module = self.construct(new_seed())
        inputs, draws_on_device = draw_first(file, device)
        self.input_source = InputSource(file, device, inputs, draws_on_device)
        tensors = [inputs[i] for i in self.input_source.tensor_indices]
        shapes = [tuple(x.shape) for x in tensors]
        self.shape = shapes[0] if len(shapes) == 1 else tuple(map(list, shapes))
        self.dtype = tensors[0].dtype
        self.input_bytes = sum(x.nbytes for x in tensors)
        check_state(file, module)
        self.parameter_bytes = sum(x.nbytes for x in module.state_dict().values())
        forward = run_first_forward(file, device, module, inputs)
        self.output_bytes = forward.output_bytes
        self.nesting = forward.nesting
        self.operators = forward.operators
        self.terms = forward.terms
        self.sharing_results = forward.sharing_results
        self.sharing_pairs = forward.sharing_pairs
        self.changed_buffers = [] if file.has_own_cases else forward.changed_buffers
        if list(module.parameters()):
            # The grading needs copies of a module with parameters. This raises if none can be made.
            file.copy(module)
        _check_room(file, device, self.all_bytes)
        self.float64_obstacle: str | None = None
        if not file.has_own_cases:
            self.float64_obstacle = find_float64_obstacle(file, module, inputs)

    # ----------------------------------------------------------------- the reference and its inputs

    def construct(self, seed: int, arguments: list | None = None) -> nn.Module:
        """Return a new module of the reference, whose parameters are drawn under the seed.

        Args:
            seed: the seed of torch's generator.
            arguments: the constructor's arguments; None for the problem's own.
        """
        return self.file.construct(
            copy.deepcopy(self.arguments if arguments is None else arguments), seed, self.device
        )

    def draw(self) -> list:
        """Return new arguments of a forward, on the device.

        Raises:
            BadReferenceError: `get_inputs` raises, or gives another form than before.
        """
        return self.input_source.draw()

    def run(self, module: nn.Module, inputs: list) -> list[torch.Tensor]:
        """Return eager's results of a forward that autograd does not record."""
        return self.file.run(module, inputs)

    def run_step(self, step: StepArguments) -> list[torch.Tensor | None]:
        """Return eager's results of a training step.

        Returns:
            The outputs, the gradients of the inputs, and the gradients of the parameters; None for
            a gradient that does not exist.

        Raises:
            BadReferenceError: the recorded forward raises, or its backward.
        """
        arguments = with_gradient_leaves(step.inputs)
        with torch.enable_grad():
            _, outputs = self.file.call_or_refuse(
                "forward", lambda: flatten(step.module(*arguments))
            )
            state = step.module.state_dict(keep_vars=True)
            sources = sources_of(arguments, [state[name] for name in step.parameters])
            gradients = self.file.call_or_refuse(
                "backward", lambda: differentiate(outputs, sources, step.output_gradients)
            )
        return [*map(as_plain_tensor, outputs), *gradients]

    # ------------------------------------------------------------------- for a subclass to override

    def reference_tensors(self, module: nn.Module, inputs: list) -> list[ReferenceTensor]:
        """Return eager's results of a forward, each with its error budget."""
        eager_results = self.run(module, inputs)
        if self.float64_obstacle:
            return [ReferenceTensor(eager, None, self.terms) for eager in eager_results]
        tf32_results = self._results_in_tf32(module, inputs, eager_results)
        exact_results = run_in_float64(self.file, module, inputs)
        tensors = []
        for eager, exact, tf32 in zip(eager_results, exact_results, tf32_results, strict=True):
            tensors.append(ReferenceTensor(eager, exact, self.terms, in_tf32=tf32))
        if self.gives_memory_back:  # exact results take much memory
            for tensor in tensors:
                tensor.forget_exact()
        return tensors

    def reference_tensor_in_step(
        self,
        eager: torch.Tensor,
        exact: torch.Tensor | None,
        terms: int,
        in_tf32: torch.Tensor | None,
    ) -> ReferenceTensor:
        """Return a result or gradient of a training step with its error budget.

        Args:
            eager: the result or gradient.
            exact: the same in float64; None where there is none.
            terms: the number of terms of the longest sum.
            in_tf32: the same, computed from operands rounded to TF32; None where there is none.
        """
        return ReferenceTensor(eager, exact, terms, in_tf32=in_tf32)

    def where_gradients_pass(self, module: nn.Module, inputs: list) -> torch.Tensor | None:
        """Return a mask of the output, true where rounding cannot change the gradient.

        Where a sum is near zero, rounding decides whether ReLU passes a gradient: the mask is false
        there. The base class does not know these places and returns None.
        """
        return None

    def cases(self, device_seed: int) -> Iterable[OwnCase]:
        """Return the problem's own small cases.

        Args:
            device_seed: the seed of a generator on the device.
        """
        return ()

    def backward_inputs(self) -> list[list[list]]:
        """Return groups of small inputs for which gradients are compared, besides the timed size.

        Each element of a group has the arguments of one forward, and gives a training step. All of
        a group have one form, and the steps of a group
        are judged together: `comparison.quantity` says when they show that a gradient is wrong. If
        `where_gradients_pass` returns a mask, a mistake in a single step decides.
        """
        return []

    def backward_arguments(self) -> list | None:
        """Return the constructor's arguments for `backward_inputs`; None for the problem's own."""
        return None

    def guesses(self, module: nn.Module, inputs: list) -> dict[str, torch.Tensor]:
        """Return results of typical mistakes, by the words that name the mistake in a message."""
        return {}

    def accuracy(self, relative: float, is_equal: bool, usual: str) -> str:
        """Return the accuracy class of a solution's results at the timed size.

        Args:
            relative: the largest relative error of a result.
            is_equal: whether all results have eager's bits.
            usual: the class of that error by `accuracy.accuracy_class`.
        """
        return "exact" if is_equal else usual

    def required_accuracy(self) -> str:
        """Return the class that results must have at the timed size; "" if the budget decides."""
        return ""

    @property
    def moved_bytes(self) -> int:
        """Bytes that count as read and written by a call: here all inputs and all outputs."""
        return self.input_bytes + self.output_bytes

    @property
    def work(self) -> int:
        """The work of one call: bytes or flops, see `limiting_rate`."""
        return self.moved_bytes

    def floor_seconds(self, timings: Timings) -> float:
        """Return an estimate of the least seconds of a call; 0 if there is none.

        Here it is the time to write the outputs at the speed of the fastest copy. It is no bound:
        stores that bypass the caches are faster than a copy.
        """
        copies = timings.seconds.get(COPY)
        return min(copies) * self.output_bytes / self.moved_bytes if copies else 0.0

    # ------------------------------------------------------------------------ not to be overridden

    @property
    def precision(self) -> str:
        """The argument of `torch.set_float32_matmul_precision` for the setting."""
        return self.setting or "highest"

    @property
    def all_bytes(self) -> int:
        """Bytes of inputs, outputs and parameters together."""
        return self.input_bytes + self.output_bytes + self.parameter_bytes

    @property
    def may_share_memory(self) -> bool:
        """True if a result of the reference shares memory with inputs or with earlier results."""
        return bool(self.sharing_results)

    @property
    def gives_memory_back(self) -> bool:
        """True if contestants give unused memory back to the GPU, so that others can take it.

        On a CPU nobody has to: the system takes freed memory back.
        """
        if self.device.type == "cpu":
            return False
        _, memory = torch.cuda.mem_get_info(self.device)
        return self.all_bytes > LARGE_SHARE * memory

    def operators_in_tf32(self) -> tuple[str, ...]:
        """Return substrings of the names of operators that torch may compute in TF32."""
        return operators_in_tf32(self.operators, self.device, self.dtype)

    def _results_in_tf32(
        self, module: nn.Module, inputs: list, eager_results: list[torch.Tensor]
    ) -> list[torch.Tensor | None]:
        """Return a forward's results from operands rounded to TF32; None where TF32 is not allowed.

        They are computed in float64 and converted to eager's dtypes, which take less memory. The
        error of the conversion is far below that of TF32.
        """
        operators = self.operators_in_tf32()
        if not operators:
            return [None] * len(eager_results)
        wide_results = run_in_tf32(self.file, module, inputs, operators)
        return [x.to(eager.dtype) for x, eager in zip(wide_results, eager_results, strict=True)]


def _with_index(device: torch.device) -> torch.device:
    """Return a device with the index that its tensors have: "cuda" becomes "cuda:0", say."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _check_room(file: ReferenceFile, device: torch.device, all_bytes: int) -> None:
    """Raise BadReferenceError if the grading does not fit into the device's memory.

    Args:
        file: the reference.
        device: the device.
        all_bytes: the bytes of inputs, outputs and parameters together.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()
    needed = NEEDED_MEMORY * all_bytes
    usable = MAX_SHARE_OF_FREE * free_bytes(device)
    if needed > usable:
        raise file.bad(
            f"grading needs about {needed / 2**30:,.1f} GiB of memory on {device}, and "
            f"{usable / 2**30:,.1f} GiB can be used"
        )
