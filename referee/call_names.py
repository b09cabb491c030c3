"""The names of the calls that a process can be asked for, and of the yardsticks in reports."""

MODULE = "module"  # the module that the process has constructed: the solution's, or eager's
NOTHING = "nothing"  # the empty call, which returns an existing tensor
COPY = "copy"  # a copy into memory that exists
COPY_FRESH = "copy, fresh memory"  # a copy into new memory, with its page faults
COMPILED = "torch.compile"  # eager's module, compiled
