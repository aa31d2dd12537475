"""Graphs as patterns read them: canonical calls, values, versions, views and products. No module is specific to one
pattern."""
