"""Checks of rewritten programs against an fp64 reference."""
