"""How people write the families this project recognises, one file of small cases a family."""
