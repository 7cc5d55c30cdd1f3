"""Role autoscaler: groups of actors as large as their load asks for."""
