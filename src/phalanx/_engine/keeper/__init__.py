"""Runs in guard and keeper, the helper processes of a group: they start, signal and reap its workers."""
