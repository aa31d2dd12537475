"""A differential fuzzer: it checks that random programs behave alike when run eagerly, compiled, and rewritten.

    python -m tests.fuzz --programs 10000 --processes 16 --log fuzz.log     (make fuzz PROGRAMS=10000)

`program` defines and prints programs, `vocabulary` has the functions beside torch that their text may call, `generate`
draws a program from a seed, `compare` runs it, `shrink` reduces a failing one, and `campaign` runs many and counts.
`kept` declares programs that once failed.
"""
