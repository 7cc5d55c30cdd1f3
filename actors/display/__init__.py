"""What people see of a run while it works."""
