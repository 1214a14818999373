"""`zerofit launch`: a run on all accelerators and machines."""
