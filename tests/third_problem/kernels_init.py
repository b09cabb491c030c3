SOURCES["gelu"] = [
    "gelu/gelu_op.cpp",
    "gelu/gelu_cpu.cpp",
    "gelu/gelu.cu",
    "cpu/memory_pool.cpp",
]
