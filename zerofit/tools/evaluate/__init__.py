"""`zerofit evaluate`: run tasks of lm-evaluation-harness on a trained model."""
