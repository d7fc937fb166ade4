"""The command-line options that the examples share."""

from __future__ import annotations

import argparse


def parser(
    description: str, *, replicas: int, batch_size: int, epochs: int, learning_rate: float
) -> argparse.ArgumentParser:
    """Returns a parser for the options of every example; the arguments are the defaults."""
    result = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = result.add_argument
    add("--replicas", type=positive, default=replicas, help="virtual replicas: micro-batches in a global batch")
    add("--batch-size", type=positive, default=batch_size, help="global batch: digits in one optimizer step")
    add("--learning-rate", type=float, default=learning_rate, help="of the optimizer")
    add("--epochs", type=positive, default=epochs, help="passes over the digits")
    add(
        "--full",
        action="store_true",
        help="train on all of MNIST, downloaded by Keras, instead of 4,000 shipped digits",
    )
    return result


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parses the command line, and checks that there is a global batch, which falls into equal micro-batches."""
    options = parser.parse_args()
    if options.batch_size > (digits := 50_000 if options.full else 4_000):
        parser.error(f"--batch-size {options.batch_size} is more than the {digits} digits to train on")
    if options.batch_size % options.replicas:
        parser.error(
            f"--batch-size {options.batch_size} cannot be cut into --replicas {options.replicas} equal micro-batches"
        )
    return options


def positive(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive whole number")
    return int(text)


positive.__name__ = "whole number"  # argparse puts the name in its message for what int() refuses
