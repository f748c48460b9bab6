"""Whole training steps of models: PyTorch's layers beside ours, eager and compiled."""
