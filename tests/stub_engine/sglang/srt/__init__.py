"""Holds `server_args`, where SGLang keeps its command line."""
