"""Some draws of the sampler agree, its draws reach what they are meant to reach, and it finds a broken engine out."""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

from microstrat import _keras, _whole
from tests.samplers import whole as sampler

ROOT = pathlib.Path(__file__).parents[1]


def test_draws_agree() -> None:
    command = [sys.executable, "-m", "tests.samplers.whole", "--draws", "25", "--seed", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    assert done.stdout.splitlines()[-1] == "25 draws, 0 mismatches"


def test_a_draw_depends_on_its_seed_and_index_only() -> None:
    assert sampler.draw(0, 7) == sampler.draw(0, 7)
    assert len({str(sampler.draw(seed, index)) for seed in (0, 1) for index in range(50)}) == 100


def test_draws_reach_everything() -> None:
    draws = [sampler.draw(0, index) for index in range(500)]
    for field in dataclasses.fields(sampler.Draw):
        values = [getattr(one, field.name) for one in draws]
        if isinstance(values[0], bool):
            assert {True, False} == set(values), field.name
    assert {one.micro_batches for one in draws} == set(range(1, 9))
    assert {one.rows[0] for one in draws} == set(range(1, 41))
    assert {one.style for one in draws} == set(sampler.STYLES)
    assert {one.optimizer for one in draws} == set(sampler.OPTIMIZERS)
    assert {one.loss for one in draws} == {loss for losses in sampler.TARGETS.values() for loss in losses}
    assert {name for one in draws for name in one.metrics} == {
        name for names in sampler.METRICS.values() for name in names
    }
    assert {one.by_hand for one in draws} == {"mean", "sum", "weighted", None}
    assert {one.weights for one in draws} == {"rows", "tokens", "classes", None}
    # Batches that are not cut evenly, and those that have fewer rows than there are micro-batches.
    uneven = [one for one in draws for rows in one.rows if rows % one.micro_batches and rows > one.micro_batches]
    assert len(uneven) > 200
    assert len([one for one in draws for rows in one.rows if rows < one.micro_batches]) > 20


# --- Broken engines -------------------------------------------------------------------------------------------------------
def _first(condition: Callable[[sampler.Draw], Any]) -> sampler.Draw:
    """The first draw that is quick to run, really cut, not evenly, and meets the condition."""
    return next(
        one
        for one in (sampler.draw(0, index) for index in itertools.count())
        if one.model in ("linear", "mlp", "shared", "embedding")
        and one.micro_batches > 2
        and one.rows[0] > one.micro_batches
        and one.rows[0] % one.micro_batches
        and not one.jit
        and condition(one)
    )


def _every_one_weighs_the_same(self: Any) -> tf.Tensor:
    return tf.constant(1 / self.turns.most, tf.float64)


def _all_terms_vary(self: Any, value: tf.Tensor) -> Any:
    return ([], [value]) if self.varies(value) else ([value], [])


BROKEN: dict[str, tuple[Any, str, Any, Callable[[sampler.Draw], Any]]] = {
    "micro-batches of other sizes weigh the same": (
        _whole.WholeBatch,
        "fraction",
        _every_one_weighs_the_same,
        lambda one: one.loss_reduction == "mean" and one.by_hand == "mean",
    ),
    "weights that are set are ignored": (
        _whole.WholeBatch,
        "set_weight",
        lambda self, weight: None,
        lambda one: one.by_hand == "weighted" and one.weights,
    ),
    "gradients are not added up": (
        _whole.WholeBatch,
        "_differentiable_total",
        lambda self, value: self.mean(value),
        lambda one: not one.optimizer_options.get("gradient_accumulation_steps"),
    ),
    "metrics are averaged": (
        _whole.WholeBatch,
        "combine_write",
        lambda self, variable, method, value: self.mean(tf.convert_to_tensor(value, variable.dtype)),
        lambda one: one.metrics and one.style in ("distributed", "fit"),
    ),
    "a regularizer counts for every micro-batch": (
        _whole.WholeBatch,
        "_terms",
        _all_terms_vary,
        lambda one: (
            one.loss_reduction == "sum"
            and one.regularizer
            and one.style in sampler.LOOP_STYLES
            and not (one.metrics or one.track_loss)
        ),
    ),
    "sums are taken for means": (
        _keras,
        "_as_declared",
        lambda loss, reduction, combiner, *, is_sum: loss,
        lambda one: one.by_hand is None and one.loss_reduction == "mean" and one.reduction == "sum",
    ),
    "sums of sample weights are not told": (
        _keras,
        "_share",
        lambda part, combiner: tf.ones_like(part),
        lambda one: one.by_hand is None and one.reduction == "mean_with_sample_weight" and one.weights == "rows",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_engine_is_found_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, attribute, replacement, condition = BROKEN[name]
    one = _first(condition)
    assert sampler.check(one).agrees
    monkeypatch.setattr(owner, attribute, replacement)
    assert not sampler.check(one).agrees
