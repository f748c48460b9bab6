"""A GPU as the place of a run: PyTorch's tensors, CUDA events, the speed of copying its memory."""
