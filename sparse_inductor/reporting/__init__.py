"""Reports of rewrites and near misses, as records and as text."""
