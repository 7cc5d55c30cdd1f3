"""The tests' stand-in for SGLang, found by an engine whose PYTHONPATH names the folder above. Never ships."""
