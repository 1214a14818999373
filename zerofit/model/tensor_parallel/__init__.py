"""Tensor parallelism: each rank holds and computes a share of each layer (Shoeybi et al. 2019, Megatron-LM).

A family's file says which layers are cut, and how (`TensorPlan`). All else of a model is as transformers has it.
"""
