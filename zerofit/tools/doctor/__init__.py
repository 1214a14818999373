"""`zerofit doctor`: what holds, who set it, and whether it can run here."""
