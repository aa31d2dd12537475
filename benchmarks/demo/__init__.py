"""The demo: a masked-LM encoder with SPLADE pooling, unrewritten and rewritten, on English text."""
