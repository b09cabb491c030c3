"""Inputs of a problem: draws them on its device, and says what all of them have in common."""

from contextlib import suppress

import torch

from referee.contestants.forms import flat_bytes, forms_of, is_float8
from referee.reference.file import BadReferenceError, ReferenceFile


class InputSource:
    """Draws the arguments of forwards, all in the form of the first ones.

    Args:
        file: the reference, whose `get_inputs` is called.
        device: the device on which the inputs have to be.
        first: the first inputs, as `draw_first` returns them.
        draws_on_device: whether `get_inputs` is called on the device; otherwise the inputs are
            drawn on the CPU and moved.

    Attributes:
        tensor_indices: the indices of those inputs that are tensors with elements.
        float_indices: the indices of those tensors that hold floats; float8 does not count.
        repeats: whether `get_inputs` draws equal inputs each time, as under a fixed seed. It
            is not tried, and False, if the problem has cases of its own.
        repeating_indices: the indices of those tensors that are equal each time; all if `repeats`.

    Raises:
        BadReferenceError: no input is a tensor with elements, or `get_inputs` raises or gives
            another form at the second call.
    """

    def __init__(
        self, file: ReferenceFile, device: torch.device, first: list, draws_on_device: bool
    ) -> None:
        self._file = file
        self._device = device
        self._draws_on_device = draws_on_device
        self._form = forms_of(first)
        self.tensor_indices = [i for i, x in enumerate(first) if _is_tensor(x) and x.numel()]
        self.repeating_indices: list[int] = []
        if not file.has_own_cases:
            second = self.draw()
            self.repeating_indices = [
                i for i in self.tensor_indices if _are_equal(first[i], second[i])
            ]
        self.repeats = bool(self.tensor_indices) and self.repeating_indices == self.tensor_indices
        if not self.tensor_indices:
            raise file.bad("get_inputs gives no tensor with elements; at least one is needed")
        self.float_indices = [i for i in self.tensor_indices if _is_drawable_float(first[i])]

    def draw(self) -> list:
        """Return new arguments of a forward, on the device.

        Raises:
            BadReferenceError: `get_inputs` raises, or gives another form than before.
        """
        if self._draws_on_device:
            inputs = self._file.draw(self._device)
        else:
            inputs = _draw_on_cpu(self._file, self._device)
        if forms_of(inputs) != self._form:
            raise self._file.bad(self._describe_change(inputs))
        return inputs

    def _describe_change(self, inputs: list) -> str:
        """Return in words how inputs differ from the form of the first ones."""
        _, first_forms = self._form
        _, forms = forms_of(inputs)
        for i, (first, form) in enumerate(zip(first_forms, forms, strict=False)):
            if "constant" in first and "constant" in form and first != form:
                return (
                    f"get_inputs draws another value of input {i} each time; only tensors may vary"
                )
        return "get_inputs draws inputs of another form each time; shapes and dtypes must stay"


def draw_first(file: ReferenceFile, device: torch.device) -> tuple[list, bool]:
    """Return the first inputs, and whether `get_inputs` can draw on the device.

    Some files draw on the CPU only, and their inputs are moved to the GPU.

    Raises:
        BadReferenceError: `get_inputs` raises.
    """
    if device.type == "cpu":
        return file.draw(), True
    with suppress(BadReferenceError):
        return file.draw(device), True
    return _draw_on_cpu(file, device), False


def _draw_on_cpu(file: ReferenceFile, device: torch.device) -> list:
    """Draw inputs on the CPU, and move them to the device."""
    return [x.to(device) if _is_tensor(x) else x for x in file.draw()]


def _is_tensor(x: object) -> bool:
    """Return whether an argument of a forward is a tensor."""
    return isinstance(x, torch.Tensor)


def _are_equal(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Return whether two tensors of one form have equal values."""
    return torch.equal(flat_bytes(x), flat_bytes(y))


def _is_drawable_float(x: torch.Tensor) -> bool:
    """Return whether a tensor holds floats that torch can draw."""
    return x.is_floating_point() and not is_float8(x)
