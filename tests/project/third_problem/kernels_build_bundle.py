# tests/project/test_third_problem.py appends this to a copy of kernels/build/bundle.py.
_RECIPES["gelu"] = _Recipe(
    title="ModelNew for KernelBench level 1 #26: GELU.",
    reference="Gelu",
    replacement="GeluNew",
    operators="gelu_ops",
    python_files=["interception.py"],
)
