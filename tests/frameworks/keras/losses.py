"""The losses of a fit, step by step."""

from __future__ import annotations

import keras


class Losses(keras.callbacks.Callback):
    """Keep the loss of every step."""

    def __init__(self):
        super().__init__()
        self.values = []

    def on_train_batch_begin(self, batch, logs=None):
        # Losses are averaged over an epoch unless the metrics are reset.
        self.model.reset_metrics()

    def on_train_batch_end(self, batch, logs=None):
        self.values.append(float(logs["loss"]))
