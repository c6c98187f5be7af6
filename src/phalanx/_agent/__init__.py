"""Restarts of a group: its attempts, the policy, and what they need."""
