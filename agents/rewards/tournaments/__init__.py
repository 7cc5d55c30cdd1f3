"""Group rewards by comparing members with each other: which pairs meet, and what ranking follows. docs/rewards.md."""
