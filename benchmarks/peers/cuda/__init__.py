"""The contestants of a run on a GPU, on tensors of PyTorch's that all of them share."""
