"""The second order: gradients of the backward pass itself.

`formulas` is written once, with Python's operators, so that it is the same code for NumPy, PyTorch
and JAX. `blocks` evaluates it a block at a time, for arrays that can be written to (NumPy's and
PyTorch's). `arrays` is the public function on NumPy arrays; `backnorm.torch.second_order` and
`backnorm.jax.formulas` are its counterparts. The oracle (`backnorm.reference`) shares none of it.
"""

from backnorm.second_order.arrays import batch_norm_double_backward

__all__ = ["batch_norm_double_backward"]
