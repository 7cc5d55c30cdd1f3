"""From weights as they are trained to the types and scales that a quantised engine loads, and back.

    config.json's quantization_config --> Quantisation (plan.py) --> for each tensor: a form (fp8, mxfp8, int4), or as it is

Functions on tensors, one tensor at a time, on whichever device it is; torch is imported by those only.
"""
