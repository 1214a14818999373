"""Tasks of lm-evaluation-harness on a trained model."""
