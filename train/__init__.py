"""zerofit: train it, fit it, prove it."""

__version__ = "0.1.0"
