"""physarum: fully asynchronous reinforcement-learning post-training on a message bus.

The packages live at the repository's top level and are linked here, so that their short names
(`agents`, `bus`) never collide with other distributions: import `physarum.bus`, never `bus`.
"""

__version__ = "0.1.0"
