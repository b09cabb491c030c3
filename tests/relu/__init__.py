"""ReLU: results and gradients.

test_relu_forward, test_relu_backward    every dtype, shape and layout
test_properties_relu                     random tensors
"""
