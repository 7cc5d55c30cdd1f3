"""The typed configuration and the ready-made recipes."""
