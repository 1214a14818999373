"""`zerofit launch`: a run on the accelerators and machines that are there."""
