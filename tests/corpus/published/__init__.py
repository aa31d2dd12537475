"""The families as public repositories and libraries write them: a spelling each, with its source."""
