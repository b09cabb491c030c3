"""The process in which a solution runs: it does what `remote` asks for, and judges nothing.

Requests and replies are lines of JSON; tensors travel through a mapped file, the first half of
which holds what comes in, the second what goes out. Whatever the solution may want to replace is
bound, or its identity noted, before the solution is loaded.

`server` forks the process, in which `main` answers requests: `worker` has them, `feed` those that
bring inputs and parameters. `step` differentiates, for the judge too. `watch` sees what a solution
changes and calls.
"""
