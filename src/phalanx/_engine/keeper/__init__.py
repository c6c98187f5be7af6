"""Runs in guard and keeper, the helper processes of a group. Workers are started, signalled and reaped here."""
