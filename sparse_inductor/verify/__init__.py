"""Rewritten programs checked against an fp64 reference."""
