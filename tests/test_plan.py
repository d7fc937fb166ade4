"""The planner by itself: random graphs, its invariants, and the shapes of plans we know."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from microstrat import _plan
from microstrat._plan import Node


@st.composite
def graphs(draw: st.DrawFn) -> list[Node]:
    """Random graphs: arguments, random draws, reads and writes of three resources, collectives, hubs, ordering edges."""
    nodes = [Node(varying=True, argument=True), Node(argument=True)]
    last_write: dict[int, int] = {}
    reads: dict[int, list[int]] = {}
    for index in range(2, draw(st.integers(3, 40))):
        values = [i for i, node in enumerate(nodes) if not node.hub]
        inputs = tuple(draw(st.lists(st.sampled_from(values), max_size=3)))
        after = tuple(draw(st.lists(st.integers(0, index - 1), max_size=2)))
        kind = draw(st.sampled_from(["pure", "pure", "pure", "random", "read", "write", "collective", "hub", "cheap"]))
        required = draw(st.integers(0, 4)) == 0
        if kind == "collective":
            nodes.append(Node(inputs=(draw(st.sampled_from(values)),), collective=True, required=required))
        elif kind == "hub":
            nodes.append(Node(after=after, hub=True))
        elif kind == "read":
            resource = draw(st.integers(0, 2))
            ordered = (last_write[resource],) if resource in last_write else ()
            reads.setdefault(resource, []).append(index)
            nodes.append(Node(after=ordered, pure=False, reads=resource, required=required))
        elif kind == "write":
            resource = draw(st.integers(0, 2))
            ordered = tuple(reads.pop(resource, ())) + ((last_write[resource],) if resource in last_write else ())
            last_write[resource] = index
            nodes.append(
                Node(inputs, after + ordered, pure=False, effect=True, required=True, writes=frozenset({resource}))
            )
        elif kind == "random":
            nodes.append(Node(inputs, after, varying=True, pure=False, effect=True, required=required))
        else:
            nodes.append(Node(inputs, after, cheap=kind == "cheap", required=required))
    return nodes


def stages_of(plan: _plan.Plan, node: int) -> set[int]:
    return {index for index, stage in enumerate(plan.stages) if node in stage.nodes or node in stage.copies}


@settings(max_examples=150, deadline=None)
@given(graphs())
def test_every_live_node_is_in_exactly_one_stage(nodes: list[Node]) -> None:
    plan = _plan.plan(nodes)
    placed = [node for stage in plan.stages for node in stage.nodes]
    assert len(placed) == len(set(placed))
    live = _plan.find_live(nodes)
    assert set(placed) == {i for i, node in enumerate(nodes) if live[i] and not node.argument and not node.collective}


@settings(max_examples=150, deadline=None)
@given(graphs())
def test_stages_have_one_colour(nodes: list[Node]) -> None:
    plan, varying = _plan.plan(nodes), _plan.find_varying(nodes)
    for index, stage in enumerate(plan.stages):
        for node in (*stage.nodes, *stage.copies):
            if index % 2 == 0:
                assert not varying[node] or nodes[node].hub
            else:
                # In a loop stand varying nodes, bundles of ordering edges, and what may be computed again anywhere.
                movable = node in stage.copies or nodes[node].pure or nodes[node].reads is not None
                assert varying[node] or nodes[node].hub or movable


@settings(max_examples=150, deadline=None)
@given(graphs())
def test_no_value_comes_from_a_later_stage(nodes: list[Node]) -> None:
    plan = _plan.plan(nodes)
    for node in plan.stage:
        if nodes[node].argument:
            continue
        for source in nodes[node].inputs:
            if nodes[source].argument:
                continue
            if nodes[node].collective:
                assert plan.stage[source] <= plan.stage[node]
                continue
            for at in stages_of(plan, node):
                assert at in stages_of(plan, source) or plan.stage[source] <= at


@settings(max_examples=150, deadline=None)
@given(graphs())
def test_carried_and_shared_values_are_those_that_cross_stages(nodes: list[Node]) -> None:
    plan, varying = _plan.plan(nodes), _plan.find_varying(nodes)
    crossing = set()
    for index, stage in enumerate(plan.stages):
        for node in (*stage.nodes, *stage.copies):
            for source in nodes[node].inputs:
                if nodes[source].argument or index in stages_of(plan, source):
                    continue
                if not (nodes[source].collective and plan.stage[source] == index):
                    crossing.add(source)
    for node, at in plan.stage.items():
        if nodes[node].collective:
            (source,) = nodes[node].inputs
            taken_in = at - 1 if varying[source] else at
            if not nodes[source].argument and taken_in not in stages_of(plan, source):
                if not (nodes[source].collective and plan.stage[source] == taken_in):
                    crossing.add(source)
    assert {node for node in crossing if varying[node]} == plan.carries
    assert {node for node in crossing if not varying[node]} == plan.shared


@settings(max_examples=150, deadline=None)
@given(graphs())
def test_effects_keep_their_order(nodes: list[Node]) -> None:
    plan = _plan.plan(nodes)
    for node in plan.stage:
        for before in nodes[node].after:
            if nodes[node].effect and nodes[before].effect and before in plan.stage:
                assert plan.stage[before] <= plan.stage[node]


@settings(max_examples=150, deadline=None)
@given(graphs())
def test_a_read_sees_the_writes_before_it_and_none_after(nodes: list[Node]) -> None:
    plan, varying = _plan.plan(nodes), _plan.find_varying(nodes)
    for node in plan.stage:
        if nodes[node].reads is None:
            continue
        for write in plan.stage:
            if nodes[node].reads not in nodes[write].writes:
                continue
            for at in stages_of(plan, node):
                if write > node:
                    # In a loop, every turn but the first follows a write; what varies there is a row of its own.
                    assert plan.stage[write] >= at + (at % 2 and not varying[node])
                else:
                    assert plan.stage[write] <= at


@settings(max_examples=50, deadline=None)
@given(graphs())
def test_planning_is_deterministic(nodes: list[Node]) -> None:
    assert _plan.plan(nodes) == _plan.plan(list(nodes))


def training_step() -> list[Node]:
    return [
        Node(varying=True, argument=True),  # 0 replica id
        Node(argument=True),  # 1 batch
        Node(argument=True),  # 2 weight handle
        Node((0, 1), cheap=True),  # 3 micro-batch
        Node((2,), pure=False, reads="weight"),  # 4 weight
        Node((3, 4)),  # 5 loss
        Node((5, 4)),  # 6 gradient
        Node((6,), collective=True),  # 7 summed gradient
        Node((2, 7), after=(4,), pure=False, effect=True, required=True, writes=frozenset({"weight"})),  # 8 update
        Node((5,), required=True),  # 9 returned
    ]


def test_a_training_step_is_three_stages() -> None:
    plan = _plan.plan(training_step())
    assert len(plan.stages) == 3
    assert set(plan.stages[1].nodes) == {3, 4, 5, 6, 9}
    assert plan.stages[2].nodes == (8,)
    assert plan.collectives == {1: (7,)}
    assert not plan.carries
    assert plan.num_loops == 1


def test_a_weight_that_the_optimizer_reads_is_read_again_there() -> None:
    nodes = training_step()
    nodes.append(Node((4,)))  # 10 weight decay
    nodes[8] = Node((2, 7, 10), after=(4,), pure=False, effect=True, required=True, writes=frozenset({"weight"}))
    plan = _plan.plan(nodes)
    assert stages_of(plan, 4) == {1, 2}
    assert not plan.shared


def test_ordering_edges_from_values_do_not_tear_stages() -> None:
    nodes = training_step()
    # A constant in the gradient, ordered after the loss, as TensorFlow's gradient code makes them.
    nodes.append(Node(after=(5,)))
    nodes[6] = Node((5, 4, 10))
    assert len(_plan.plan(nodes).stages) == 3


def test_a_gathered_value_that_feeds_varying_work_makes_a_second_loop_and_a_carry() -> None:
    nodes = [
        Node(varying=True, argument=True),  # 0 replica id
        Node((0,)),  # 1 embedding
        Node((1,), collective=True),  # 2 all embeddings
        Node((1, 2), required=True),  # 3 contrastive loss
    ]
    plan = _plan.plan(nodes)
    assert plan.num_loops == 2
    assert plan.carries == {1}
    assert plan.stage[3] == 3


def test_cycles_are_refused() -> None:
    with pytest.raises(_plan.CycleError):
        _plan.plan([Node((1,), required=True), Node((0,))])


def test_the_planner_does_not_import_tensorflow() -> None:
    code = (
        "import importlib.util, sys\n"
        f"spec = importlib.util.spec_from_file_location('plan', {_plan.__file__!r})\n"
        "module = importlib.util.module_from_spec(spec); sys.modules['plan'] = module; spec.loader.exec_module(module)\n"
        "assert not any(name.split('.')[0] in ('tensorflow', 'keras', 'numpy') for name in sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
