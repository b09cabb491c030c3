"""Both modules in torch.

test_pytorch, test_operators, test_vmap   torch's features, direct calls of the operators
test_compile, test_distributed            torch.compile, export, several processes
test_tensor_kinds                         subclasses of Tensor, sparse tensors and others
test_interception, test_changed_linear    code that replaces functions or modules
test_float32_settings                     torch's settings of precision
test_memory, test_soak                    lack of memory, many calls from several threads
"""
