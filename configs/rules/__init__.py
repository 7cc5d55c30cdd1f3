"""Rules over several sections, by what they are about (semantic.py runs them all)."""
