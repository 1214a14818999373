"""Runs side by side, while they train and afterwards."""
