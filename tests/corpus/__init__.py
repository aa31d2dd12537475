"""The corpus: small programs as people write the families that this project recognises, one folder per family."""
