"""Runs episodes: leases tasks, drives engines, publishes executions."""
