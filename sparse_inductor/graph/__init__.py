"""Graphs as patterns read them: canonical calls, values, versions, views and products, of no family alone."""
