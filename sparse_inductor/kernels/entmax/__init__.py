"""Entmax over rows."""
