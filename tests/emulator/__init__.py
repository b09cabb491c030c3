"""CUDA kernels on a CPU: `test_emulator` compiles these C++ programs, which run the kernels."""
