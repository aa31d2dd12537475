"""explain(): one call, what would be rewritten in it and why not more, as text and as an HTML page."""
