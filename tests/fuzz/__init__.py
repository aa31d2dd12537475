"""A differential fuzzer: random programs, run eagerly, compiled and rewritten, have to do the same.

    python -m tests.fuzz --programs 10000 --processes 16 --log fuzz.log     (make fuzz PROGRAMS=10000)

`program` has what a program is and prints it, `vocabulary` what its text may call beside torch, `generate` draws one
from a seed, `compare` runs it, `shrink` makes a failing one small, `campaign` runs many and counts.
"""
