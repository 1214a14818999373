"""`zerofit plan`: what fits and how large a batch, predicted before there is a machine."""
