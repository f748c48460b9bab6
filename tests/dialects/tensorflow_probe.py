"""Print, as JSON, TensorFlow's own description of its operators and what its forward returns."""

from __future__ import annotations

import json
import os
import sys

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
# TensorFlow's other kernels leave the reserved outputs of an inference unwritten, and are the
# default on processors without AVX-512.
os.environ["TF_ENABLE_ONEDNN_OPTS"] = "1"

import numpy as np
import tensorflow as tf
from tensorflow.python.framework import op_def_registry

TYPES = {1: "float32", 14: "bfloat16", 19: "half"}


def described(op):
    definition = op_def_registry.get(op)
    attributes = {a.name: a for a in definition.attr}
    return {
        "inputs": [[t.name, t.type_attr] for t in definition.input_arg],
        "outputs": [[t.name, t.type_attr] for t in definition.output_arg],
        "types": [TYPES[t] for t in attributes["T"].allowed_values.list.type],
        "formats": [s.decode() for s in attributes["data_format"].allowed_values.list.s],
        "defaults": {
            "epsilon": attributes["epsilon"].default_value.f,
            "data_format": attributes["data_format"].default_value.s.decode(),
            "is_training": attributes["is_training"].default_value.b,
        },
    }


def forward(path):
    with np.load(path) as operands:
        inputs = {name: tf.constant(operands[name]) for name in operands.files}
    results = []
    for options in ({}, {"exponential_avg_factor": 0.75}, {"is_training": False}):
        out = tf.raw_ops.FusedBatchNormV3(**inputs, **options)
        results.append([options, {k: v.numpy().tolist() for k, v in out._asdict().items()}])
    return results


ops = [f"FusedBatchNorm{kind}{version}" for kind in ("", "Grad") for version in ("", "V2", "V3")]
print(json.dumps({"ops": {op: described(op) for op in ops}, "forward": forward(sys.argv[1])}))
