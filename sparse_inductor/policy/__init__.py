"""Which recognised blocks are rewritten: tables of break-even points, profiles, decisions."""
