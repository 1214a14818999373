"""The model of bytes and seconds: what a training step takes, before there is a machine."""
