"""The main module of processes that a script run by `microstrat run` spawns with multiprocessing."""

from microstrat import _cli

_cli.run_in_child(globals())
