"""Share code among test files.

tensors, properties        inputs, modules and calls; strategies of the property-based tests
beside_torch, compare      comparisons with a reference: of modules, of bits, of errors
promises, float32_on_gpu   the promises about float32's errors; operands and steps on a GPU
named_operands, compositions, adversary   operands with names, random ones, a search for the worst
split_twin                 the float32 GEMMs' arithmetic on a CPU
processes, command_line    new processes; `run.py` as a process
tiny_build                 processes that build and load a tiny extension
made_up_results            results of run.py, for tests of tables and pictures
sanitize, sanitized_tests  the tests under sanitizers, and which tests they are
"""
