"""The second order: gradients of the backward pass.

`formulas` uses only Python's operators, so the same code serves NumPy, PyTorch and JAX. `blocks`
evaluates the formulas block by block, for arrays that can be written to (NumPy's and PyTorch's).
`arrays` has the public function for NumPy arrays; the functions for PyTorch's and JAX's arrays are
in `backnorm.torch` and `backnorm.jax.formulas`. The oracle (`backnorm.reference`) shares no code
with any of these modules.
"""

from backnorm.second_order.arrays import batch_norm_double_backward

__all__ = ["batch_norm_double_backward"]
