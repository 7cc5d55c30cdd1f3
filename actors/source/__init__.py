"""Issues tasks: one leader by lease, its position its own."""
