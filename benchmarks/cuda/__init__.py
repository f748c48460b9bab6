"""An NVIDIA GPU as the device of a run, and the clocks for its calls."""
