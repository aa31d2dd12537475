"""What other libraries need to be told before they can be rewritten; each is asked for by name, for one object."""
