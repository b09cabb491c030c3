"""This project's two problems as the referee needs them, and the benchmarks.

relu.py                 ReLU: its cases and error limits
elementwise.py          values, shapes and layouts for ReLU's cases
linear_relu_divide.py   Linear -> ReLU -> divide: its cases and error limits
linear_yardsticks.py    products that are timed beside Linear; one is in triton_tf32x3.py
operands.py             operands on which products err most
small_cases.py          cases that both problems have
sizes.py                the problems by name, and the shapes of x; its records are in shapes.py
torch_check.py          what the programs say if torch is not installed
benchmark/              measures the figures beside the headline; makes the tables and the picture
                        of README and docs/BENCHMARKS.md
"""
