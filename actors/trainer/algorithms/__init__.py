"""Objectives as pure functions from tensors to tensors.

Invariant: nothing here knows Megatron, the bus or a configuration; each function names its formula and its paper; what
a masked token holds reaches nothing; sums add up over microbatches and ranks.
Shapes: T tokens, V vocabulary, n samples. Log-probabilities are natural logarithms (nats).

    rewards --shaping, filters--> advantages/ --whitening--> advantage per token
    logits --logprobs, nucleus, columns--> log-probabilities --corrections/--> weight and mask per token
    both --losses/--> loss per token --reduction--> loss of the batch

The table of all of them, with papers and tests, is docs/algorithms.md.
"""
