"""The code on the pages about TensorFlow and Keras runs, and prints what they say."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from ...support.pages import pages_of, run


# Of Keras's, where it saves a model.
@pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept:DeprecationWarning")
@pytest.mark.parametrize("page", pages_of("tensorflow"))
def test_code_of_page_runs(page, rng, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # models are saved
    # What readers have: a model with data to fit it to, and tensors.
    layers = [keras.layers.BatchNormalization(), keras.layers.Flatten(), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model.compile("sgd", "mse")
    x, dy = rng.standard_normal((2, 4, 6, 6, 3), dtype=np.float32)
    channel = [tf.constant(values) for values in np.ones((4, 3), np.float32)]
    names = dict(zip(("gamma", "beta", "moving_mean", "moving_variance"), channel, strict=True))
    left = run(page, model=model, x=tf.constant(x), dy=tf.constant(dy), y=x[:, 0, 0, :1], **names)
    assert isinstance(left["model"].layers[0], keras.layers.BatchNormalization)
    assert not isinstance(left["model"].layers[0], left["BatchNormalization"])
