"""The benchmark: what microstrat costs in time, memory and start-up, next to the ways to do without it.

Run it with `python -m tests.benchmarks --help`. The modules, as a case flows through them:

    case      which program is measured, on which model
    models    the models, and data of their shape
    peers     the programs: microstrat, and the hand-written and library ways to train the same model on the same batch
    jax_peer  the one program that is not of TensorFlow
    dispatch  what a step costs where computing is nothing
    worker    one process that builds one program and runs steps of it on command
    driver    a worker seen from the process that commands it
    measure   drives workers in turn, and turns what they say into results, next to the targets
    results   samples, measurements and comparisons
    report    results as tables, plots, the README section, and JSON while they come
"""
