_RECIPES["gelu"] = _Recipe(
    title="ModelNew for KernelBench level 1 #26: GELU.",
    reference="Gelu",
    replacement="GeluNew",
    operators="gelu_ops",
    python_files=["interception.py"],
)
