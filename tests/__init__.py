"""Tests of the two problems' modules, their kernels, `run.py`, `problems/` and the documents.

ReLU
    test_relu_forward, test_relu_backward     every dtype, shape and layout
    test_properties_relu                      random tensors

Linear -> ReLU -> divide
    test_linear_forward, test_linear_backward, test_properties_linear    results and gradients
    test_split, test_tensor_cores             the arithmetic of float32, in a program for the CPU
    test_linear_float32, test_linear_ranges   the arithmetic of float32, on a GPU
    test_linear_layouts                       operands stored by rows or by columns
    test_linear_one_product                   float32 at `high`
    test_linear_paths, test_linear_chunks, test_linear_schedule    who computes what, without a GPU

Both modules and torch
    test_pytorch, test_operators, test_vmap   torch's features, direct calls of the operators
    test_compile, test_distributed            torch.compile, export, several processes
    test_tensor_kinds                         subclasses of Tensor, sparse tensors and others
    test_interception, test_changed_linear    code that replaces functions or modules
    test_float32_settings                     torch's settings of precision
    test_memory, test_soak                    lack of memory, many calls from several threads

The build
    test_toolchain, test_build, cache/        the tools, imports, the cache of builds
    test_bundle, test_two_versions            the one-file bundle, two versions in a process
    test_emulator                             CUDA kernels on a CPU

run.py, grading, measurements and documents
    test_run, test_results, test_pictures     the command line and its output
    test_problems, test_third_problem         `problems/`, and what a third problem needs
    test_solutions, test_solutions_by_problem, test_reference_files    graded files
    test_planted_faults                       faults in copies of the kernels
    test_benchmarks, test_benchmark_paths, test_benchmark_path_grid    `problems/benchmark`
    test_readme                               README, documents and docstrings

The tests of the referee itself are in `referee/tests`. The other folders here are

support/        what several test files share: comparisons, operands, tables of graded files
emulator/       C++ programs that run CUDA kernels on the CPU
solutions/      files that are graded: honest ones, and designs for a GPU (`test_solutions.py`)
third_problem/  what `test_third_problem.py` adds to a copy of the project
"""
