"""The SPLADE head."""
