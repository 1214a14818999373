"""GELU in its tanh form as one kernel: importing this file makes it so for every model that is built afterwards.

transformers computes "gelu_new", of GPT-2 and its kin, in eight operations that keep five tensors of the widest layer
for the backward pass. torch.nn.functional.gelu(approximate="tanh") is the same function (Hendrycks and Gimpel 2016),
keeps its input alone, and differs by rounding. Stored configurations keep the name.
"""

from transformers.activations import ACT2FN, GELUTanh

ACT2FN["gelu_new"] = GELUTanh
