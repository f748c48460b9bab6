"""Whole training steps of models: a framework's layers and ours."""
