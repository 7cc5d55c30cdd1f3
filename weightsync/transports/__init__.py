"""How verified weights get from a host's memory into an engine: one interface, chosen by what is there."""
