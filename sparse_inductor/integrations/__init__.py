"""Adaptations of objects of other libraries that allow more rewrites. Each is applied explicitly to one object."""
