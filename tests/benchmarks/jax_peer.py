"""`jax-scan`, the program that a user of Keras' JAX backend would write: `lax.scan` over micro-batches in one `jax.jit`.

It is for a process of its own, with KERAS_BACKEND=jax in its environment. microstrat needs Keras' TensorFlow backend, so
neither it nor `peers` may be imported here. Steps are always compiled by XLA, whatever the case says: jit is nothing else.

Two things to know when figures are read. Keras' seeds give other initial weights, and other masks, on this backend. And on
CPUs, XLA (jaxlib 0.12.0) leaves a loop's gradient convolutions in a form for which it has no fast kernel; outside loops it
rewrites them. So convolutional nets are several times slower here than with `lax.scan(..., unroll=True)`.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import keras

from tests.benchmarks.models import MODELS

if TYPE_CHECKING:
    from tests.benchmarks.case import Case
    from tests.benchmarks.peers import Run


@dataclass(frozen=True)
class Program:
    """As `peers.Program`."""

    model: keras.Model
    run: Run
    first_call: None = None


def build(case: Case) -> Program:
    """The same model, batches, loss and optimizer as those of `peers`."""
    if keras.backend.backend() != "jax":
        raise RuntimeError(f"jax-scan needs KERAS_BACKEND=jax; Keras runs on {keras.backend.backend()!r}.")
    model = MODELS[case.model].build()
    optimizer = {"sgd": keras.optimizers.SGD, "adam": keras.optimizers.Adam}[case.optimizer](1e-3)
    optimizer.build(model.trainable_variables)
    variables = (model.trainable_variables, model.non_trainable_variables, optimizer.variables)

    def loss_and_state(trainable: Any, non_trainable: Any, x: jax.Array, y: jax.Array) -> tuple[jax.Array, Any]:
        logits, non_trainable = model.stateless_call(trainable, non_trainable, x, training=True)
        losses = keras.losses.sparse_categorical_crossentropy(y, logits, from_logits=True)
        return losses.sum() / case.global_batch, non_trainable

    def step(state: Any, batch: Any) -> tuple[Any, jax.Array]:
        trainable, non_trainable, slots = state

        def add(carry: Any, micro_batch: Any) -> tuple[Any, None]:
            total, non_trainable = carry
            (loss, non_trainable), gradients = jax.value_and_grad(loss_and_state, has_aux=True)(
                trainable, non_trainable, *micro_batch
            )
            return (jax.tree.map(jax.numpy.add, total, (loss, gradients)), non_trainable), None

        zeros = jax.tree.map(jax.numpy.zeros_like, (jax.numpy.float32(0), trainable))
        micro_batches = jax.tree.map(lambda rows: rows.reshape(case.replicas, case.micro_batch, *rows.shape[1:]), batch)
        ((loss, gradients), non_trainable), _ = jax.lax.scan(add, (zeros, non_trainable), micro_batches)
        trainable, slots = optimizer.stateless_apply(slots, gradients, trainable)
        return (trainable, non_trainable, slots), loss

    compiled = jax.jit(step, donate_argnums=0)
    x, y = MODELS[case.model].rows(4 * case.global_batch)
    starts = range(0, len(x), case.global_batch)
    batches = itertools.cycle([(x[i : i + case.global_batch], y[i : i + case.global_batch]) for i in starts])

    def run(steps: int) -> jax.Array:
        state = jax.tree.map(lambda variable: variable.value, variables)
        for batch in itertools.islice(batches, steps):
            state, loss = compiled(state, batch)
        # The arrays that the variables had were donated to the first step.
        jax.tree.map(lambda variable, value: variable.assign(value), variables, state)
        return jax.block_until_ready((state, loss))[1]

    return Program(model, run)
