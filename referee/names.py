"""Names of what a process can be asked to call; reports and problems use them, too."""

COPY = "copy"
COPY_FRESH = "copy, fresh memory"  # a copy that also pays the page faults of new memory
COMPILED = "torch.compile"
MODULE = "module"  # the contestant's own module
NOTHING = "nothing"  # the empty call, which returns a tensor that is there already
