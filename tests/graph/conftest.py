from __future__ import annotations

import copy

import pytest

SHAPE, CHANNELS = [4, 3, 2, 2], [3]


def logical_tensor(id_, shape, dtype="f32", **more):
    stride = [1]
    for dim in reversed(shape[1:]):
        stride.insert(0, stride[0] * max(dim, 1))
    return {
        "id": id_,
        "dtype": dtype,
        "shape": shape,
        "stride": stride if shape else [],
        "layout_type": "strided",
        "property_type": "undef",
    } | more


def attribute(type_, value):
    return {"type": type_, "value": value}


ATTRIBUTES = {"epsilon": attribute("f32", 1e-5), "data_format": attribute("string", "NCX")}


@pytest.fixture
def tensor():
    return logical_tensor


@pytest.fixture
def backward():
    """A graph of one BatchNormTrainingBackward on tensors 0-4, to 5-7; a fresh copy each time."""
    return {
        "version": "3.0.0",
        "engine_kind": "cpu",
        "fpmath_mode": "strict",
        "graph": [
            {
                "id": 10,
                "name": "bn",
                "kind": "BatchNormTrainingBackward",
                "attrs": copy.deepcopy(ATTRIBUTES),
                "inputs": [
                    logical_tensor(0, SHAPE),
                    logical_tensor(1, SHAPE),
                    *(logical_tensor(id_, CHANNELS) for id_ in (2, 3, 4)),
                ],
                "outputs": [
                    logical_tensor(5, SHAPE),
                    logical_tensor(6, CHANNELS),
                    logical_tensor(7, CHANNELS),
                ],
            }
        ],
    }


@pytest.fixture
def training_step(backward):
    """The backward of a forward, listed before it: its mean and variance are the forward's."""
    backward["graph"][0]["inputs"][2] = logical_tensor(24, CHANNELS)
    backward["graph"][0]["inputs"][3] = logical_tensor(25, CHANNELS)
    backward["graph"].append(
        {
            "id": 20,
            "name": "forward",
            "kind": "BatchNormForwardTraining",
            "attrs": copy.deepcopy(ATTRIBUTES),
            "inputs": [
                logical_tensor(0, SHAPE),
                *(logical_tensor(id_, CHANNELS) for id_ in (2, 3, 4, 8)),
            ],
            "outputs": [
                logical_tensor(21, SHAPE),
                *(logical_tensor(id_, CHANNELS) for id_ in (22, 23, 24, 25)),
            ],
        }
    )
    return backward
