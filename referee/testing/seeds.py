"""Makes `torch.manual_seed` quick on a machine without an accelerator."""

import torch


def seed_only_what_is_there() -> None:
    """Let `torch.manual_seed` leave out the kinds of accelerators that this machine does not have.

    torch would keep each seed for the first use of such an accelerator, with a traceback. Under
    pytest, that takes almost a millisecond.
    """
    for accelerator in (torch.cuda, torch.mtia, torch.xpu):
        if not accelerator.is_available():
            accelerator.manual_seed_all = lambda _: None
