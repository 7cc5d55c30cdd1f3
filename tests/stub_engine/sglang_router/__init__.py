"""The tests' stand-in for sglang-router 0.3.2."""
