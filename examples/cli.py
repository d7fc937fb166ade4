"""The command-line options that the examples share."""

from __future__ import annotations

import argparse


def parser(
    description: str,
    *,
    batch_size: int,
    epochs: int,
    learning_rate: float,
    micro_batches: int | None = None,
    replicas: int | None = None,
) -> argparse.ArgumentParser:
    """Returns a parser for the options of every example; the arguments are the defaults, one of the last two is given."""
    result = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = result.add_argument
    if micro_batches is not None:
        add("--micro-batches", type=positive, default=micro_batches, help="parts that each batch is cut into")
    if replicas is not None:
        add("--replicas", type=positive, default=replicas, help="virtual replicas, which share each batch equally")
    add("--batch-size", type=positive, default=batch_size, help="digits in one optimizer step")
    add("--learning-rate", type=float, default=learning_rate, help="of the optimizer")
    add("--epochs", type=positive, default=epochs, help="passes over the digits")
    add(
        "--full",
        action="store_true",
        help="train on all of MNIST, downloaded by Keras, instead of 4,000 shipped digits",
    )
    return result


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parses the command line, and checks that there is a full batch, which replicas can share equally."""
    options = parser.parse_args()
    if options.batch_size > (digits := 50_000 if options.full else 4_000):
        parser.error(f"--batch-size {options.batch_size} is more than the {digits} digits to train on")
    if "replicas" in options and options.batch_size % options.replicas:
        parser.error(f"--batch-size {options.batch_size} cannot be shared equally by --replicas {options.replicas}")
    return options


def positive(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive whole number")
    return int(text)


positive.__name__ = "whole number"  # argparse puts the name in its message for what int() refuses
