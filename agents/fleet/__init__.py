"""Which engine serves the next request, decided in each process alone from what the engines announce; nothing here waits."""
