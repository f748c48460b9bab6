from __future__ import annotations

import numpy as np
import pytest

from backnorm.dialects import ngraph


def test_from_node_order_equals_documented_order(batch, same):
    b = batch((4, 3, 5), "NCX")
    x, dy, mean, variance, gamma, beta = b.values()
    same(
        ngraph.from_node_order(
            ngraph.BatchNormTrainingBackprop, gamma, beta, x, mean, variance, dy, 1e-3
        ),
        ngraph.BatchNormTrainingBackprop(x, gamma, beta, mean, variance, dy, 1e-3),
    )
    same(
        ngraph.from_node_order(ngraph.BatchNormTraining, gamma, beta, x, 1e-3),
        ngraph.BatchNormTraining(x, gamma, beta, 1e-3),
    )
    same(
        (ngraph.from_node_order(ngraph.BatchNormInference, gamma, beta, x, mean, variance, 1e-3),),
        (ngraph.BatchNormInference(x, gamma, beta, mean, variance, 1e-3),),
    )


def test_backprop_with_array_as_epsilon_raises_error_with_its_shape_not_its_elements(rng):
    x, channel = rng.standard_normal((2, 3, 4, 4), dtype=np.float32), np.ones(3, np.float32)
    with pytest.raises(TypeError, match="epsilon: must be a real number") as caught:
        # The order of arguments of another operator.
        ngraph.BatchNormTrainingBackprop(x, channel, channel, channel, channel, 1e-5, x)
    assert "got an array of shape (2, 3, 4, 4) and dtype float32" in str(caught.value)
    assert str(x[0, 0, 0, 0]) not in str(caught.value)
