"""As if PyTorch were not there."""

raise ModuleNotFoundError("No module named 'torch'", name="torch")
