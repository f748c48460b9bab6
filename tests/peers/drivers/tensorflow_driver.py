"""TensorFlow's FusedBatchNormGradV3 on the CPU."""

from __future__ import annotations

import os

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import numpy as np
import tensorflow as tf
from protocol import serve


def backward(case, x, dy, mean, variance, gamma):
    outputs = tf.raw_ops.FusedBatchNormGradV3(
        y_backprop=dy,
        x=x,
        scale=gamma,
        reserve_space_1=mean,
        # On the CPU the second reserved value is the biased variance.
        reserve_space_2=variance,
        reserve_space_3=np.zeros(0, np.float32),
        epsilon=case["epsilon"],
        data_format={"NXC": "NHWC", "NCX": "NCHW"}[case["data_format"]],
        is_training=case["training"],
    )
    return [output.numpy() for output in outputs[:3]]


serve(backward)
