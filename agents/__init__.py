"""Episodes: the Generate protocol, token-exact trajectories and environments. Knows nothing of Megatron."""
