"""A further node of an engine that spans several hosts."""
