"""Objectives as pure functions from tensors to tensors.

Invariant: nothing here knows Megatron, the bus or a configuration; each function names its formula and its paper.
Shapes: T tokens, V vocabulary, n samples. Log-probabilities are natural logarithms (nats).
"""
