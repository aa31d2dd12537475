"""Entmax attention."""
