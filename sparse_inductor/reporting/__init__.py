"""What was rewritten and what nearly was, as records and as text for people."""
