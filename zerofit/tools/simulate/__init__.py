"""A simulated accelerator for PyTorch, with which the tests run and `zerofit compare --simulate` measures."""
