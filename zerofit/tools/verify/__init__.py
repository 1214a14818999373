"""`zerofit verify`: proof, on a user's own recipe, that strategies agree and that a killed run loses nothing."""
