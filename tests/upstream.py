"""Test suites that others wrote, out of the installed wheels, run against MicroBatchStrategy.

    python -m tests.upstream SUITE KIND FILE

runs "tensorflow", "keras" or "tf_keras" with strategies of "ours" (or "mirrored", to see what upstream's own does) and
writes what came of every case to FILE. A case is about 1 or 2 replicas, or about a "whole" batch in micro-batches. The
suites are imported, never copied; tests/test_upstream.py makes a test of each case.

    tensorflow  strategy_test_lib's mixins, whose `_test_…` methods take a strategy; in eager mode, in TensorFlow 1 graphs,
                and with their replica functions plain or a tf.function
    keras       every test of Keras 3 that makes a MirroredStrategy; it gets one of ours instead
    tf_keras    the bases of its distribution tests, which take a strategy, with small models
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import itertools
import json
import pathlib
import re
import sys
import tempfile
import time
import types
import unittest
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from tests import worker

SUITES = ("tensorflow", "keras", "tf_keras")
TENSORFLOW = "tensorflow.python.distribute.strategy_test_lib"
STRATEGIES = {
    "DistributionTestBase": ("1", "2", "whole"),
    "OneDeviceDistributionTestBase": ("1", "whole"),
    "TwoDeviceDistributionTestBase": ("2",),
    "RemoteSingleWorkerMirroredStrategyBase": ("2",),
}
"""strategy_test_lib's classes, and which strategies they are for."""
SESSION = "in a TensorFlow 1 session, each fetch of anything that `run` returned runs all of it again"
CLUSTER = "starts servers, to see on which of two machines the input is"
ROWS = "all-reduces rows of the batch, which is refused if they are cut"
NOT_APPLICABLE = {
    "DistributionTestBase._test_minimize_loss_eager graph": "is for eager mode",
    "DistributionTestBase._test_replica_id graph 2": "runs a session inside a replica function that is being traced",
    "DistributionTestBase._test_global_step_update graph": SESSION,
    "DistributionTestBase._test_numpy_dataset": "is for TensorFlow 1's strategies; upstream skips it",
    "OneDeviceDistributionTestBase._test_device_and_input_device_are_colocated": CLUSTER,
    "OneDeviceDistributionTestBase._test_all_reduce_sum_gradients eager": "tf.gradients needs a graph; upstream skips it",
    "OneDeviceDistributionTestBase._test_all_reduce_mean_gradients eager": "likewise",
    "TwoDeviceDistributionTestBase._test_all_reduce_sum_gradients eager 2 plain": "likewise",
    "TwoDeviceDistributionTestBase._test_all_reduce_mean_gradients eager 2 plain": "likewise",
    "OneDeviceDistributionTestBase._test_all_reduce_sum graph whole": ROWS,
    "OneDeviceDistributionTestBase._test_all_reduce_mean graph whole": ROWS,
    "RemoteSingleWorkerMirroredStrategyBase._testDeviceScope": "asserts the name of another machine's device",
}
"""Beginnings of cases' names, and why they can't be about a strategy on one device."""


def why_not(case: str) -> str | None:
    """Why a case is not applicable, if it isn't."""
    return next((reason for start, reason in NOT_APPLICABLE.items() if f"{case} ".startswith(start)), None)


# --- What there is ----------------------------------------------------------------------------------------------------
def _source(module: str) -> pathlib.Path:
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None, f"{module} is not installed"
    return pathlib.Path(spec.origin)


def _methods(path: pathlib.Path) -> Iterator[tuple[str, ast.FunctionDef]]:
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef):
            yield from ((node.name, method) for method in node.body if isinstance(method, ast.FunctionDef))


def tensorflow_cases() -> list[str]:
    """CLASS.METHOD MODE STRATEGY, and how the replica function runs if the method lets one choose."""
    cases = []
    for name, method in _methods(_source(TENSORFLOW)):
        arguments = [argument.arg for argument in method.args.args]
        required = arguments[: len(arguments) - len(method.args.defaults)]
        if name not in STRATEGIES or not method.name.startswith("_test") or required[1:] not in (
            ["strategy"], ["d"], ["dist"], ["distribution"]
        ):  # fmt: skip
            continue
        runs = ("plain", "function") if "run_in_function" in arguments else ("",)
        for mode, which, how in itertools.product(("eager", "graph"), STRATEGIES[name], runs):
            cases.append(f"{name}.{method.name} {mode} {which} {how}".rstrip())
    return [
        *cases,
        "DistributionTestBase._test_input_fn_iterable eager 1",
        "DistributionTestBase._test_input_fn_iterable eager 2",
    ]


def keras_cases() -> list[str]:
    """MODULE.CLASS.METHOD of what makes a MirroredStrategy, in the method itself or in its class's setUp."""
    root = _source("keras.src").parent
    cases = []
    for path in sorted(root.rglob("*_test.py")):
        if "MirroredStrategy" not in path.read_text(encoding="utf-8"):
            continue
        module = ".".join(["keras", "src", *path.relative_to(root).with_suffix("").parts])
        methods = list(_methods(path))
        making = {(name, method.name) for name, method in methods if "MirroredStrategy" in ast.unparse(method)}
        cases += [
            f"{module}.{name}.{method.name}"
            for name, method in methods
            if method.name.startswith("test_") and ((name, method.name) in making or (name, "setUp") in making)
        ]
    return cases


def tf_keras_cases() -> list[str]:
    """CLASS.CASE STRATEGY of what stands in TF_KERAS."""
    names = [f"{name}.{case}" for name, of_class in TF_KERAS.items() for case in of_class]
    return [*(f"{name} 2" for name in names), *(f"{name} whole" for name in TF_KERAS_WHOLE)]


def cases(suite: str) -> list[str]:
    """The names of all cases of a suite."""
    return {"tensorflow": tensorflow_cases, "keras": keras_cases, "tf_keras": tf_keras_cases}[suite]()


# --- Running them -----------------------------------------------------------------------------------------------------
def make_strategy(kind: str, which: str) -> Any:
    """The strategy that a case is about."""
    import microstrat

    if which == "whole":
        return microstrat.MicroBatchStrategy(4, semantics="whole_batch")
    return worker.mirrored(int(which)) if kind == "mirrored" else microstrat.MicroBatchStrategy(int(which))


def tensorflow_case(case: str, kind: str) -> unittest.TestCase:
    """One of strategy_test_lib's cases."""
    import tensorflow as tf

    library = importlib.import_module(TENSORFLOW)
    method, mode, which, *how = case.split()
    cls, method = method.split(".")
    replicas = 2 if which == "2" else 1

    class Case(getattr(library, cls)):
        def _get_num_gpus(self) -> int:
            return replicas

        def _test_input_fn_iterable(self, strategy: Any) -> None:
            input_fn = self._input_fn_to_test_input_context(
                lambda: tf.data.Dataset.range(10),
                expected_num_replicas_in_sync=replicas,
                expected_num_input_pipelines=1,
                expected_input_pipeline_id=0,
            )
            expected = [list(range(first, first + replicas)) for first in range(0, 10, replicas)]
            super()._test_input_fn_iterable(strategy, input_fn, expected)

        def runTest(self) -> None:
            strategy = make_strategy(kind, which)
            arguments = {"run_in_function": how == ["function"]} if how else {}
            with tf.Graph().as_default() if mode == "graph" else mock.MagicMock():
                getattr(self, method)(strategy, **arguments)

    return Case()


def keras_case(case: str, kind: str) -> unittest.TestCase:
    """One of Keras' cases, with all its parameters."""
    import tensorflow as tf

    import microstrat

    class Ours(microstrat.MicroBatchStrategy):
        def __init__(self, devices: list[str]):
            super().__init__(len(devices))

    # What test modules import for other backends only, and Keras' own conftest.py, which is not in its wheel.
    absent: Any = {name: mock.MagicMock() for name in ("jax", "torch") if importlib.util.find_spec(name) is None}
    absent["conftest"] = types.SimpleNamespace(skip_if_backend=lambda *_: lambda test: test)
    module, cls, method = case.rsplit(".", 2)
    with mock.patch.dict(sys.modules, absent):
        tests = unittest.defaultTestLoader.loadTestsFromTestCase(getattr(importlib.import_module(module), cls))
    found = [test for test in tests if re.fullmatch(rf"{method}\d*", test._testMethodName)]
    assert found, f"{case}: no such test"

    class Case(unittest.TestCase):
        def run(self, result: Any = None) -> Any:
            constructor = tf.distribute.MirroredStrategy if kind == "mirrored" else Ours
            with mock.patch.object(tf.distribute, "MirroredStrategy", constructor):
                for test in found:
                    test.run(result)
            return result

        def runTest(self) -> None:
            raise NotImplementedError

    return Case()


# --- tf_keras ---------------------------------------------------------------------------------------------------------
def correctness(**how: Any) -> Callable[[Any, Any], None]:
    return lambda case, strategy: case.run_correctness_test(strategy, **how)


def saving(*how: str) -> Callable[[Any, Any], None]:
    def run(case: Any, strategy: Any) -> None:
        models = importlib.import_module("tf_keras.src.distribute.simple_models")
        for number, model in enumerate(how[1:]):
            with mock.patch.object(case, "get_temp_dir", lambda number=number: tempfile.mkdtemp(f"-{number}")):
                model = getattr(models, model)()
                if how[0] == "no_strategy_restore_strategy":
                    case.run_test_save_no_strategy_restore_strategy(model, strategy)
                elif how[0] == "strategy_restore_no_strategy":
                    case.run_test_save_strategy_restore_no_strategy(model, strategy, save_in_scope=number % 2 == 0)
                else:
                    case.run_test_save_strategy_restore_strategy(
                        model, strategy, strategy, save_in_scope=number % 2 == 1
                    )

    return run


MODELS = ("SimpleFunctionalModel", "SimpleSequentialModel", "SimpleSubclassModel")


def fitting(method: str, **how: Any) -> Callable[[Any, Any], None]:
    return lambda case, strategy: getattr(case, method)(strategy, **how)


def serving(case: Any, strategy: Any) -> None:
    """Preprocessing layers, training and serving, as tf_keras' own tests put kpl_test_utils together."""
    import tensorflow as tf
    import tf_keras

    with strategy.scope():
        feature_mapper, label_mapper = case.define_kpls_for_training(use_adapt=True)
        model = case.define_model()
        optimizer, accuracy = tf_keras.optimizers.legacy.RMSprop(0.1), tf_keras.metrics.Accuracy()
    data = strategy.distribute_datasets_from_function(lambda context: case.dataset_fn(feature_mapper, label_mapper))

    def replica_step(features: Any, labels: Any) -> None:
        with tf.GradientTape() as tape:
            predicted = model(features, training=True)
            losses = tf_keras.losses.BinaryCrossentropy(reduction="none")(labels, predicted)
            loss = tf.nn.compute_average_loss(losses)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(list(zip(gradients, model.trainable_variables, strict=True)))
        accuracy.update_state(labels, tf.cast(predicted > 0.5, tf.int64))

    iterator = iter(data)
    step = tf.function(lambda inputs: strategy.run(replica_step, args=inputs))
    for _ in range(10):
        step(next(iterator))
    case.assertGreater(float(accuracy.result()), 0.5)
    case.test_save_load_serving_model(model, feature_mapper, case.define_reverse_lookup_layer())


TF_KERAS: dict[str, dict[str, Callable[[Any, Any], None]]] = {
    "Dense": {
        "arrays": correctness(use_numpy=True, use_validation_data=True),
        "arrays_evaluated": correctness(use_numpy=True, use_validation_data=False),
        "datasets": correctness(use_numpy=False, use_validation_data=True),
        "datasets_evaluated": correctness(use_numpy=False, use_validation_data=False),
        "partial_batches_in_evaluation": correctness(
            use_numpy=True, use_validation_data=False, partial_last_batch="eval", training_epochs=1
        ),
        "partial_batches": correctness(
            use_numpy=False, use_validation_data=False, partial_last_batch="train_and_eval", training_epochs=1
        ),
        "batch_norm": correctness(use_numpy=True, use_validation_data=True, with_batch_norm="regular"),
        "synchronized_batch_norm": correctness(use_numpy=True, use_validation_data=True, with_batch_norm="sync"),
        "learning_rates": lambda case, strategy: case.run_dynamic_lr_test(strategy),
    },
    "Embedding": {
        "arrays": correctness(use_numpy=True, use_validation_data=True),
        "datasets": correctness(use_numpy=False, use_validation_data=False),
    },
    "KerasSaved": {
        "no_strategy_restore_strategy": saving("no_strategy_restore_strategy", *MODELS),
        "strategy_restore_no_strategy": saving("strategy_restore_no_strategy", *MODELS),
        "strategy_restore_strategy": saving("strategy_restore_strategy", *MODELS),
    },
    "Saved": {
        "no_strategy_restore_strategy": saving("no_strategy_restore_strategy", *MODELS),
        "strategy_restore_no_strategy": saving("strategy_restore_no_strategy", *MODELS),
        "strategy_restore_strategy": saving("strategy_restore_strategy", *MODELS),
    },
    "DatasetCreator": {
        "fit": fitting("_model_fit"),
        "fit_several_steps": fitting("_model_fit", steps_per_execution=5),
        "fit_eagerly": fitting("_model_fit", run_eagerly=True, steps_per_epoch=2),
        "fit_lookup": fitting("_model_fit", use_lookup_layer=True),
        "fit_dataset": fitting("_model_fit", use_dataset_creator=False),
        "evaluate": fitting("_model_evaluate"),
        "evaluate_several_steps": fitting("_model_evaluate", steps_per_execution=5),
        "evaluate_dataset": fitting("_model_evaluate", use_dataset_creator=False),
        "predict": fitting("_model_predict"),
        "predict_several_steps": fitting("_model_predict", steps_per_execution=5),
    },
    "Preprocessing": {"serving": serving},
}


TF_KERAS_WHOLE = (
    "Dense.arrays",
    "Dense.datasets",
    "Dense.partial_batches",
    "Dense.synchronized_batch_norm",
    "Dense.learning_rates",
    "Embedding.arrays",
)
"""Those that compare with no strategy, and so are about whole batches too."""


def tf_keras_case(case: str, kind: str) -> unittest.TestCase:
    """One of the cases in TF_KERAS: an upstream class, completed as its docstrings ask for, with a strategy."""
    import numpy as np
    import tensorflow as tf
    import tf_keras
    from tf_keras.src.distribute import dataset_creator_model_fit_test_base as creator
    from tf_keras.src.distribute import keras_correctness_test_base as base
    from tf_keras.src.distribute import saved_model_test_base as saved
    from tf_keras.src.utils import kpl_test_utils

    def finish(inputs: Any, outputs: Any, initial_weights: Any, optimizer: Any) -> Any:
        model = tf_keras.Model(inputs, outputs)
        if initial_weights:
            model.set_weights(initial_weights)
        model.compile(optimizer=optimizer, loss="mean_squared_error", metrics=["mean_squared_error"])
        return model

    class Dense(base.TestDistributionStrategyCorrectnessBase):
        def get_data(self) -> Any:
            x = np.random.rand(640, 3).astype(np.float32)
            return x, x.sum(axis=1, keepdims=True), x[: base._GLOBAL_BATCH_SIZE]

        def get_data_with_partial_last_batch(self) -> Any:
            x, y, predicted = self.get_data()
            return x[:-10], y[:-10], x[:-20], y[:-20], predicted

        def get_data_with_partial_last_batch_eval(self) -> Any:
            x, y, predicted = self.get_data()
            return x, y, x[:-10], y[:-10], predicted

        def get_model(self, initial_weights: Any = None, distribution: Any = None, input_shapes: Any = None) -> Any:
            del input_shapes
            with base.MaybeDistributionScope(distribution):
                inputs = tf_keras.Input((3,))
                outputs = tf_keras.layers.Dense(5, activation="relu")(inputs)
                if self.with_batch_norm:
                    synchronized = self.with_batch_norm == "sync"
                    outputs = tf_keras.layers.BatchNormalization(synchronized=synchronized)(outputs)
                outputs = tf_keras.layers.Dense(1)(outputs)
                return finish(inputs, outputs, initial_weights, tf_keras.optimizers.legacy.SGD(0.05))

    class Embedding(base.TestDistributionStrategyEmbeddingModelCorrectnessBase):
        def get_model(self, initial_weights: Any = None, distribution: Any = None, input_shapes: Any = None) -> Any:
            del input_shapes
            with base.MaybeDistributionScope(distribution):
                inputs = tf_keras.Input((10,), dtype=tf.int32)
                outputs = tf_keras.layers.Embedding(20, 10)(inputs)
                outputs = tf_keras.layers.Dense(1)(tf_keras.layers.GlobalAveragePooling1D()(outputs))
                return finish(inputs, outputs, initial_weights, tf_keras.optimizers.SGD(0.1))

    class KerasSaved(saved.TestSavedModelBase):
        def _save_model(self, model: Any, saved_dir: str) -> None:
            model.save(saved_dir, save_format="tf")

        def _load_and_run_model(
            self, distribution: Any, saved_dir: str, predict_dataset: Any, output_name: str = "output_1"
        ) -> Any:
            del output_name
            model = tf_keras.models.load_model(saved_dir)
            return self._predict_with_model(distribution, model, predict_dataset)

    class Saved(saved.TestSavedModelBase):
        def _save_model(self, model: Any, saved_dir: str) -> None:
            tf.saved_model.save(model, saved_dir)

        def _load_and_run_model(
            self, distribution: Any, saved_dir: str, predict_dataset: Any, output_name: str = "output_1"
        ) -> Any:
            return saved.load_and_run_with_saved_model_api(distribution, saved_dir, predict_dataset, output_name)

    class DatasetCreator(creator.DatasetCreatorModelFitTestBase):
        pass

    class Preprocessing(kpl_test_utils.DistributeKplTestUtils):
        pass

    name, which = case.split()
    cls, method = name.split(".")
    known = {made.__name__: made for made in (Dense, Embedding, KerasSaved, Saved, DatasetCreator, Preprocessing)}
    run_test = TF_KERAS[cls][method]

    def run(self: Any) -> None:
        run_test(self, make_strategy(kind, which))

    return type(cls, (known[cls],), {"runTest": run})()


def outcome(test: unittest.TestCase) -> dict[str, str]:
    """What came of a test: {"outcome": "passed", "failed" or "skipped", "text"}."""
    result = unittest.TestResult()
    test.run(result)
    if bad := result.errors + result.failures:
        return {"outcome": "failed", "text": "\n".join(text for _, text in bad)}
    if result.skipped:
        return {"outcome": "skipped", "text": result.skipped[0][1]}
    assert result.testsRun
    return {"outcome": "passed", "text": ""}


def main(suite: str, kind: str, file: pathlib.Path) -> None:
    """Runs a suite's cases and writes their outcomes after each one."""
    worker.configure(2)
    make = {"tensorflow": tensorflow_case, "keras": keras_case, "tf_keras": tf_keras_case}[suite]
    outcomes = {}
    for case in cases(suite):
        if why_not(case) is None:
            start = time.perf_counter()
            outcomes[case] = outcome(make(case, kind))
            seconds = time.perf_counter() - start
            print(f"{outcomes[case]['outcome']} {seconds:.1f} s: {case} {outcomes[case]['text']}", flush=True)
            file.write_text(json.dumps(outcomes))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], pathlib.Path(sys.argv[3]))
