"""The benchmark: what microstrat costs in time, memory and start-up, next to the ways to do without it.

Run it with `python -m tests.benchmarks --help`. The modules, as a case flows through them:

    models    the models, and data of their shape
    peers     the programs: microstrat, and the hand-written and library ways to train the same model on the same batch
    worker    one process that builds one program and runs steps of it on command
    driver    a worker seen from the process that commands it
    measure   drives workers in turn, and turns what they say into results, next to the targets
    results   samples, measurements and comparisons
    report    results as tables and JSON
"""
