"""`zerofit compare`: the largest batch and the speed of each strategy, measured by running it."""
