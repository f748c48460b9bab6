"""Broken adapters: one wrong step each, as a replacement in a source file, and what catches it.

The text that is replaced occurs once in its file. The tests are those of `make test`.
"""

from __future__ import annotations

from typing import NamedTuple


class Mutant(NamedTuple):
    """A wrong step: the file below `src/backnorm`, its text, the text instead, and tests."""

    name: str
    file: str
    text: str
    replacement: str
    tests: tuple[str, ...]
    backend: str = ""


_TORCH, _JAX, _TF = (f"tests/frameworks/{name}" for name in ("torch", "jax", "tensorflow"))
_KERAS = "tests/frameworks/keras"

MUTANTS = (
    # PyTorch.
    Mutant(
        "torch: the running statistics do not move",
        "torch/engines.py",
        '{"momentum": momentum}',
        '{"momentum": 0.0}',
        (f"{_TORCH}/test_modules.py",),
    ),
    Mutant(
        "torch: momentum None is 0.1",
        "torch/modules.py",
        "momentum = 1.0 / float(counter)",
        "momentum = 0.1",
        (f"{_TORCH}/test_modules.py",),
    ),
    Mutant(
        "torch: num_batches_tracked counts twice",
        "torch/modules.py",
        "counter.add_(1)",
        "counter.add_(2)",
        (f"{_TORCH}/test_modules.py",),
    ),
    Mutant(
        "torch: epsilon is ignored in evaluation",
        "torch/engines.py",
        '_planned("inference", _of_inference(operands), options)',
        '_planned("inference", _of_inference(operands), options._replace(epsilon=0.0))',
        (f"{_TORCH}/test_functional.py",),
    ),
    Mutant(
        "torch: the residual is dropped",
        "torch/engines.py",
        '_planned("forward", operands, options)',
        '_planned("forward", (operands[0], None, *operands[2:]), options)',
        (f"{_TORCH}/test_activations.py",),
    ),
    Mutant(
        "torch: the gradient of the residual is dropped",
        "torch/eager.py",
        "dresidual if has_residual else None,",
        "torch.zeros_like(dresidual) if has_residual else None,",
        (f"{_TORCH}/test_activations.py",),
    ),
    Mutant(
        "torch: the gradients of weight and bias are swapped",
        "torch/eager.py",
        "dx, dweight, dbias, dresidual = gradients",
        "dx, dbias, dweight, dresidual = gradients",
        (f"{_TORCH}/test_gradients.py",),
    ),
    Mutant(
        "torch: a weight without a bias has no gradient",
        "torch/eager.py",
        "dweight if needed[2] else None,",
        "dweight if needed[2] and needed[3] else None,",
        (f"{_TORCH}/test_gradients.py", f"{_TORCH}/test_functional.py"),
    ),
    Mutant(
        "torch: bits of a mask are off by one in the second order",
        "torch/memory.py",
        "bits = (mask[:, None] >> shifts & 1).flatten()[: x.numel()].bool()",
        "bits = (mask[:, None] >> shifts & 1).flatten()[: x.numel()].bool().roll(1)",
        (f"{_TORCH}/test_gradients.py",),
    ),
    Mutant(
        "torch: vmap merges the wrong axis",
        "torch/registry.py",
        "return tensor.movedim(axis, channels).flatten(channels, channels + 1)",
        "return tensor.movedim(axis, channels + 1).flatten(channels, channels + 1)",
        (f"{_TORCH}/test_vmap.py",),
    ),
    Mutant(
        "torch: the second order has the wrong sign",
        "torch/library.py",
        "return gx, gdy, None, None, gweight",
        "return -gx, gdy, None, None, gweight",
        (f"{_TORCH}/test_gradients.py",),
    ),
    Mutant(
        "torch: batched gradients of a frozen layer are no function of x",
        "torch/composed.py",
        "gradient = torch.where(x.new_ones((), dtype=torch.bool), dy.double(), elements.centred)",
        "gradient = dy.double()",
        (f"{_TORCH}/test_gradients.py",),
    ),
    Mutant(
        "torch: channels_last is taken for contiguous in a mask",
        "torch/memory.py",
        "return bits.as_strided(x.shape, like.stride())",
        "return bits.view(x.shape)",
        (f"{_TORCH}/test_gradients.py",),
    ),
    Mutant(
        "torch: the order of a mask is not restored",
        "torch/eager.py",
        "if x.stride() == strides:",
        "if True:",
        (f"{_TORCH}/test_saved_tensors.py",),
    ),
    Mutant(
        "torch: a synchronised gradient divides by this process's elements",
        "torch/synchronised.py",
        "sums=(sum_dy, sum_dy_xmu), count=count,",
        "sums=(sum_dy, sum_dy_xmu), count=x.numel() // x.shape[1],",
        (f"{_TORCH}/test_synchronised.py",),
    ),
    Mutant(
        "torch: synchronised statistics are those of this process",
        "torch/synchronised.py",
        "moments = exchange.moments()",
        "exchange.moments()",
        (f"{_TORCH}/test_synchronised.py",),
    ),
    Mutant(
        "torch: running statistics are rounded twice by operators",
        "torch/library.py",
        "running_var.copy_(running_var.double() * (1.0 - momentum) + unbiased * momentum)",
        "running_var.mul_(1.0 - momentum).add_(variance * momentum)",
        (f"{_TORCH}/test_vmap.py", f"{_TORCH}/test_transforms.py"),
    ),
    Mutant(
        "torch: revert leaves options behind",
        "torch/conversion.py",
        "module.__dict__.pop(name, None)\n    return model",
        "pass\n    return model",
        (f"{_TORCH}/test_arithmetic.py", f"{_TORCH}/test_reproducible.py"),
    ),
    Mutant(
        "torch: Inductor's formula has the wrong sign",
        "torch/lowering.py",
        "dx = (dx - shift) - (x.to(gain.dtype) - center) * slope",
        "dx = (dx - shift) + (x.to(gain.dtype) - center) * slope",
        (f"{_TORCH}/test_compile.py", f"{_TORCH}/test_lowering.py"),
    ),
    # TensorFlow.
    Mutant(
        "tensorflow: the gradient takes the last axis for that of the channels",
        "tensorflow/calls.py",
        '_compute("backward", (x, dy, None, *channels), options)[:3]',
        '_compute("backward", (x, dy, None, *channels), options._replace(data_format="NXC"))[:3]',
        (f"{_TF}/test_gradients.py", f"{_TF}/test_values.py"),
    ),
    Mutant(
        "tensorflow: the gradient of frozen statistics has the wrong sign",
        "tensorflow/differentiable.py",
        "return [dx, -scale * dbeta, -0.5 * scale * s * dgamma, dgamma, dbeta]",
        "return [dx, -scale * dbeta, 0.5 * scale * s * dgamma, dgamma, dbeta]",
        (f"{_TF}/test_gradients.py",),
    ),
    Mutant(
        "tensorflow: an axis that is known late is the first",
        "tensorflow/nodes.py",
        "return node.call(_place(arrays, presence), options._replace(data_format=(axis,)))",
        "return node.call(_place(arrays, presence), options._replace(data_format=(0,)))",
        (f"{_TF}/test_graph.py",),
    ),
    Mutant(
        "tensorflow: the formula lacks the term along x",
        "formulas.py",
        "- normalised * xp.spread(slope, dx)",
        "- 0 * normalised * xp.spread(slope, dx)",
        (f"{_TF}/test_forward_mode.py", f"{_TF}/test_graph.py"),
    ),
    # Keras.
    Mutant(
        "keras: momentum is that of PyTorch",
        "keras/layer.py",
        "moving.assign(past * self.momentum + current * (1.0 - self.momentum))",
        "moving.assign(past * (1.0 - self.momentum) + current * self.momentum)",
        (f"{_KERAS}/test_layer.py",),
        "tensorflow",
    ),
    Mutant(
        "keras: the moving variance contains epsilon",
        "keras/layer.py",
        "(self.moving_variance, variance)",
        "(self.moving_variance, variance + self.epsilon)",
        (f"{_KERAS}/test_layer.py",),
        "jax",
    ),
    # JAX.
    Mutant(
        "jax: the running average weighs the batch by momentum",
        "jax/running.py",
        "((1 - momentum) * batch)",
        "(momentum * batch)",
        (f"{_JAX}/test_state.py",),
    ),
    Mutant(
        "jax: the derivative by the statistics ignores epsilon",
        "jax/derivatives.py",
        "s = inverse_std(variance, epsilon)",
        "s = inverse_std(variance, 0.0)",
        (f"{_JAX}/test_second_order.py", f"{_JAX}/test_forward_mode.py"),
    ),
    Mutant(
        "jax: the cotangents of the statistics are subtracted",
        "jax/derivatives.py",
        "dx = (dx.astype(more.dtype) + more)",
        "dx = (dx.astype(more.dtype) - more)",
        (f"{_JAX}/test_transformations.py", f"{_JAX}/test_second_order.py"),
    ),
    Mutant(
        "jax: statistics of devices have no distance between their means",
        "jax/formulas.py",
        "jax.lax.pmean(variance + apart * apart, **groups)",
        "jax.lax.pmean(variance, **groups)",
        (f"{_JAX}/test_nnx.py",),
    ),
    Mutant(
        "jax: the formula's slope has one factor too few",
        "formulas.py",
        "s * (sum_dy_xmu / xp.count)",
        "sum_dy_xmu / xp.count",
        (f"{_JAX}/test_numerics.py",),
    ),
    # The contract of front doors.
    Mutant(
        "jax: functions ignore reproducible",
        "jax/operators.py",
        "arithmetic=arithmetic, reproducible=reproducible)",
        "arithmetic=arithmetic, reproducible=False)",
        (f"{_JAX}/test_contract.py",),
    ),
    Mutant(
        "jax: functions ignore the block around them",
        "jax/operators.py",
        "arithmetic = requested(dtype, arithmetic)",
        "arithmetic = arithmetic and requested(dtype, arithmetic)",
        (f"{_JAX}/test_contract.py",),
    ),
    Mutant(
        "jax: the layer of nnx ignores its arithmetic",
        "jax/nnx.py",
        "self.arithmetic, self.reproducible = arithmetic, reproducible",
        "self.arithmetic, self.reproducible = None, reproducible",
        (f"{_JAX}/test_contract.py",),
    ),
    Mutant(
        "tensorflow: kernels compute in the arithmetic of the elements",
        "tensorflow/calls.py",
        "arithmetic = options.arithmetic or own_arithmetic(operands[0].dtype)",
        "arithmetic = own_arithmetic(operands[0].dtype)",
        (f"{_TF}/test_contract.py",),
    ),
    Mutant(
        "tensorflow: functions ignore reproducible",
        "tensorflow/operators.py",
        "arithmetic=requested(dtype, arithmetic), reproducible=reproducible,",
        "arithmetic=requested(dtype, arithmetic), reproducible=False,",
        (f"{_TF}/test_contract.py",),
    ),
    Mutant(
        "tensorflow: training may be a number",
        "tensorflow/operators.py",
        'values = epsilon, axis, arithmetic, check_flag("training", training), reproducible',
        "values = epsilon, axis, arithmetic, bool(training), reproducible",
        (f"{_TF}/test_contract.py",),
    ),
    Mutant(
        "tensorflow: without kernels the error names other tensors",
        "tensorflow/calls.py",
        'engines.kernels("tensors of TensorFlow")',
        'engines.kernels("tensors")',
        (f"{_TF}/test_contract.py",),
    ),
    Mutant(
        "torch: transforms compute in the arithmetic of the elements",
        "torch/functional.py",
        "settings = options.epsilon, options.arithmetic\n",
        "settings = options.epsilon, None\n",
        (f"{_TORCH}/test_contract.py",),
    ),
    Mutant(
        "keras: a reproducible layer has other sums",
        "keras/layer.py",
        'options |= {"reproducible": True} if self.reproducible else {}',
        'options |= {"reproducible": False} if self.reproducible else {}',
        (f"{_KERAS}/test_contract.py",),
        "tensorflow",
    ),
    Mutant(
        "keras: revert leaves options behind",
        "keras/models.py",
        "vars(layer).pop(name, None)",
        "pass",
        (f"{_KERAS}/test_options.py",),
        "tensorflow",
    ),
    # Dialects, and the canonical operator's front door.
    Mutant(
        "dialects: a repeated call finds another epsilon's",
        "dialects/operator.py",
        "    return kind, value\n",
        "    return kind\n",
        ("tests/contract/test_front_doors.py",),
    ),
    Mutant(
        "dialects: the node's order of gamma and beta is swapped",
        "dialects/ngraph.py",
        "return operator(input, gamma, beta, *others,",
        "return operator(input, beta, gamma, *others,",
        ("tests/dialects/test_ngraph.py",),
    ),
    Mutant(
        "dialects: epsilon is added to an inverse standard deviation",
        "dialects/_run.py",
        "inverse=canonical.inverse_std,",
        "inverse=False,",
        ("tests/dialects/test_cudnn.py", "tests/dialects/test_aten.py"),
    ),
    Mutant(
        "dialects: what cuDNN's memory holds is not added",
        "dialects/cudnn.py",
        "value += beta * own(target)",
        "value += 0 * own(target)",
        ("tests/dialects/test_cudnn.py",),
    ),
    Mutant(
        "operators: out is ignored",
        "operators.py",
        'compute("inference", operands, options, out)',
        'compute("inference", operands, options, None)',
        ("tests/operator/test_out.py",),
    ),
)
