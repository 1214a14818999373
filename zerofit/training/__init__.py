"""The loop, the trainer around it, evaluation and metrics."""
