"""`zerofit compare`: how large a batch each strategy holds, and how fast it is, found out by running it."""
