"""HOW to train: reads and checks the strategy, builds the Accelerator and the engine.

Only here is DeepSpeed named.
"""
