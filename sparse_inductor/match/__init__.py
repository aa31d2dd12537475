"""The vocabulary patterns are written in: canonical calls, values and versions, linears, chains of steps."""
