"""A Flower app with PyTorch."""
