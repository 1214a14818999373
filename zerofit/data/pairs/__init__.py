"""Sources and targets for encoder-decoder models."""
