"""How a chunk travels between hosts beside HTTP: read out of the holder's memory by its address."""
