"""explain(): the rewrites and near misses of one call, as text and as an HTML page."""
