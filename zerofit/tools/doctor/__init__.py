"""`zerofit doctor`: the effective settings, their sources, and whether a run can start here."""
