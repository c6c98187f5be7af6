"""Phalanx measured against its peer (torch) and the floor: the least code that does the thing.

``python -m benchmarks --list`` names the cases; ``python -m benchmarks launch import`` runs two of them.

This file stays empty: spawned workers import it, and what they import is measured.
"""
