"""`zerofit convert megatron-args`: from a Megatron command line to a recipe, a strategy pair and a launch line."""
