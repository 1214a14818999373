"""`zerofit convert`: Meta's checkpoints to transformers' and back; Megatron's command lines to recipes."""
