"""The planner: which operations of a replica function run in which stage. Pure data; imports no TensorFlow.

A traced replica function is a graph of nodes. A node is *varying* if its value may differ between replicas, else
*uniform*. Stages alternate: even stages are uniform and run once, odd stages are loops over the replicas. A collective
turns a varying value into a uniform one, so it ends a loop. An ordinary training step has three stages:

    0  uniform   what the loop needs and all replicas share
    1  loop      forward and backward pass of every micro-batch; its collectives sum the gradients
    2  uniform   the optimizer

`find_varying` colours the nodes, `plan` places them. Both are linear in the number of edges.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Node:
    """One operation, as much of it as the planner needs.

    Attributes:
      inputs: nodes whose values it reads.
      after: nodes it must follow (ordering edges).
      varying: differs between replicas whatever its inputs (a random draw, the replica id).
      argument: a value from outside (a capture, the replica id); present in every stage, never placed.
      collective: reduces its only input over the replicas.
      border: a collective between the replicas around the loops: its input is uniform here, and its result is not there
        before the stage after that of its input.
      pure: no state read or written; the same inputs give the same outputs.
      cheap: pure, and better computed again than kept or carried through a loop: a micro-batch cut out of the global
        batch, arithmetic on a few numbers, a view.
      size: roughly how many numbers its value has.
      effect: must run exactly once, or once a replica, in program order with other effects.
      hub: has no value and no effect; it only bundles ordering edges.
      required: its value is returned, or its effect must happen.
      reads: the resource that a plain read reads, if it may be read again instead of kept.
      writes: resources it may write.
    """

    inputs: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    varying: bool = False
    argument: bool = False
    collective: bool = False
    border: bool = False
    pure: bool = True
    cheap: bool = False
    size: int = 1
    effect: bool = False
    hub: bool = False
    required: bool = False
    reads: Hashable | None = None
    writes: frozenset[Hashable] = frozenset()

    @property
    def must_finish(self) -> bool:
        """Whether a function that it is part of must wait for it: effects, and reads, which no later write may overtake."""
        return (self.effect and self.required) or not (self.effect or self.pure or self.hub)


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage. `nodes` live here; `copies` live elsewhere and are computed again here."""

    nodes: tuple[int, ...]
    copies: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """Where everything runs.

    Attributes:
      stages: even ones uniform, odd ones loops.
      stage: node -> its stage, for every live node that is neither an argument nor a collective. For a collective, the
        uniform stage that can first use its result.
      carries: varying nodes whose values are kept for all replicas, because a later loop reads them.
      shared: uniform nodes whose values later stages read.
      collectives: loop stage -> the collectives it feeds, in graph order.
    """

    stages: tuple[Stage, ...]
    stage: dict[int, int]
    carries: frozenset[int]
    shared: frozenset[int]
    collectives: dict[int, tuple[int, ...]] = field(default_factory=dict)

    @property
    def num_loops(self) -> int:
        return sum(1 for index, stage in enumerate(self.stages) if index % 2 and (stage.nodes or stage.copies))


class CycleError(ValueError):
    """The nodes do not form a directed acyclic graph."""


def topological_order(nodes: Sequence[Node], keep: Sequence[bool] | None = None) -> list[int]:
    """Node ids, each after its inputs and ordering edges. `keep` limits the result and the edges to some nodes."""
    order: list[int] = []
    state = bytearray(len(nodes))  # 0 new, 1 open, 2 done
    for root in range(len(nodes)):
        if state[root] or (keep is not None and not keep[root]):
            continue
        stack = [root]
        while stack:
            node = stack[-1]
            if state[node] == 0:
                state[node] = 1
                for before in (*nodes[node].inputs, *nodes[node].after):
                    if keep is not None and not keep[before]:
                        continue
                    if state[before] == 0:
                        stack.append(before)
                    elif state[before] == 1:
                        raise CycleError(f"node {node} depends on itself")
            else:
                stack.pop()
                if state[node] == 1:
                    state[node] = 2
                    order.append(node)
    return order


def find_varying(nodes: Sequence[Node]) -> list[bool]:
    """Colours every node: True if its value, or its effect, may differ between replicas. Collectives are uniform."""
    varying = [False] * len(nodes)
    for index in topological_order(nodes):
        node = nodes[index]
        if node.hub:
            varying[index] = any(varying[before] for before in node.after)
        elif not node.collective:
            varying[index] = node.varying or any(varying[source] for source in node.inputs)
    return varying


def find_live(nodes: Sequence[Node]) -> list[bool]:
    """True for every node that a required node needs."""
    live = [False] * len(nodes)
    stack = [index for index, node in enumerate(nodes) if node.required]
    while stack:
        index = stack.pop()
        if live[index]:
            continue
        live[index] = True
        stack.extend(nodes[index].inputs)
        # An ordering edge keeps only a bundle of edges alive; effects are required themselves, values are not needed.
        stack.extend(before for before in nodes[index].after if nodes[before].hub)
    return live


def plan(nodes: Sequence[Node], varying: Sequence[bool] | None = None) -> Plan:
    """Places every live node in a stage: the first one of its colour that follows all it needs.

    Nodes then move as late as their readers allow, so that nothing is held for a stage after it: a uniform value
    through a loop, a varying one for all replicas. (A forward pass thus runs in the loop of its backward pass, even if
    an earlier loop only counts the tokens.) Constants, cuts of the global batch and repeatable reads go where they are
    read, in several stages if need be.

    Ordering edges from effects (and bundles of them) move stages; ordering edges from plain values order only within a
    stage. Gradient code puts the latter on every other constant, and honouring them would tear a network into hundreds
    of stages without changing any result.
    """
    if varying is None:
        varying = find_varying(nodes)
    live = find_live(nodes)
    order = topological_order(nodes, live)
    copyable = _find_copyable(nodes, order)
    first = _first_stages(nodes, order, live, varying, copyable)
    stage = _move_late(nodes, order, live, varying, copyable, first)
    _pull_early(nodes, order, varying, copyable, first, stage)
    for index in order:
        if nodes[index].collective:
            (source,) = nodes[index].inputs
            if varying[source] and not nodes[source].argument and source not in copyable:
                stage[index] = stage[source] + 1
    return _assemble(nodes, order, live, varying, copyable, first, stage)


def _find_copyable(nodes: Sequence[Node], order: Sequence[int]) -> set[int]:
    """Constants, and cheap nodes over arguments."""
    constant: set[int] = set()
    copyable: set[int] = set()
    for index in order:
        node = nodes[index]
        if node.argument or node.collective or node.hub or not node.pure or node.varying:
            continue
        if all(source in constant for source in node.inputs):
            constant.add(index)
            copyable.add(index)
        elif node.cheap and all(nodes[source].argument or source in copyable for source in node.inputs):
            copyable.add(index)
    return copyable


def _honours(node: Node, before: Node) -> bool:
    """Whether the ordering edge before -> node may move `node` to a later stage."""
    return before.effect or before.hub or (node.effect and not before.pure)


def _at_least(stage: int, odd: bool) -> int:
    return stage if stage % 2 == odd else stage + 1


def _first_stages(
    nodes: Sequence[Node], order: Sequence[int], live: Sequence[bool], varying: Sequence[bool], copyable: set[int]
) -> dict[int, int]:
    first: dict[int, int] = {}
    for index in order:
        node = nodes[index]
        if node.argument or index in copyable:
            first[index] = 1 if varying[index] else 0
            continue
        earliest = max((first[source] for source in node.inputs), default=0)
        for before in node.after:
            if live[before] and _honours(node, nodes[before]):
                earliest = max(earliest, first[before])
        if node.hub:
            first[index] = earliest
        elif node.collective:
            first[index] = _at_least(earliest + node.border, False)
        else:
            first[index] = _at_least(earliest, varying[index])
    return first


def _move_late(
    nodes: Sequence[Node],
    order: Sequence[int],
    live: Sequence[bool],
    varying: Sequence[bool],
    copyable: set[int],
    first: dict[int, int],
) -> dict[int, int]:
    """Moves every node to the last stage of its colour that still serves all that follows it."""
    stage = dict(first)
    last = _at_least(max(first.values(), default=0), False)
    limit: dict[int, int] = {}
    for index in reversed(order):
        node = nodes[index]
        odd = varying[index]
        latest = limit.get(index, last)
        if node.hub:
            stage[index] = max(stage[index], latest)
        elif not node.argument and index not in copyable:
            stage[index] = max(stage[index], latest - (latest % 2 != odd))
        # A collective takes its source in the loop before its own stage, where uniform sources are ready anyway.
        here = stage[index]
        if node.collective:
            here -= 2 if node.border else varying[node.inputs[0]]
        for source in node.inputs:
            limit[source] = min(limit.get(source, here), here)
        for before in node.after if index not in copyable else ():
            if live[before] and _honours(node, nodes[before]):
                limit[before] = min(limit.get(before, here), here)
    return stage


def _pull_early(
    nodes: Sequence[Node],
    order: Sequence[int],
    varying: Sequence[bool],
    copyable: set[int],
    first: dict[int, int],
    stage: dict[int, int],
) -> None:
    """Moves varying nodes back to the loop of their inputs where less is kept for all replicas that way.

    If an earlier loop computes a large value anyway, and only its sum is read later, the sum had better be kept.
    """
    later_readers: dict[int, int] = {}
    for index in order:
        for source in set(nodes[index].inputs):
            at = stage[index] - 1 if nodes[index].collective else stage[index]
            later_readers[source] = later_readers.get(source, 0) + (at > stage[source])
    for index in order:
        node = nodes[index]
        if not varying[index] or not node.pure or node.argument or node.hub or index in copyable:
            continue
        kept = [source for source in set(node.inputs) if varying[source] and source not in copyable]
        kept = [source for source in kept if not nodes[source].argument]
        earliest = max(first[index], *(stage[source] for source in node.inputs))
        if not kept or earliest >= stage[index] or earliest % 2 == 0:
            continue
        if node.size < sum(nodes[source].size for source in kept if later_readers[source] == 1):
            for source in kept:
                later_readers[source] -= 1
            stage[index] = earliest


def _assemble(
    nodes: Sequence[Node],
    order: Sequence[int],
    live: Sequence[bool],
    varying: Sequence[bool],
    copyable: set[int],
    first: dict[int, int],
    stage: dict[int, int],
) -> Plan:
    readers: dict[int, list[int]] = {index: [] for index in order}
    writers: dict[Hashable, list[int]] = {}
    for index in order:
        for source in set(nodes[index].inputs):
            readers[source].append(index)
        for resource in nodes[index].writes:
            writers.setdefault(resource, []).append(index)
    home: dict[int, int] = {}
    copies: dict[int, set[int]] = {}
    used_in: dict[int, set[int]] = {}
    repeatable: dict[tuple[int, int], bool] = {}

    def may_repeat(index: int, at: int) -> bool:
        """Whether computing a uniform node in stage `at` gives the same value, and costs less than bringing it there."""
        node = nodes[index]
        if node.argument or index in copyable:
            return not varying[index]
        if (index, at) not in repeatable:
            if node.reads is not None:
                possible = _may_read_again(nodes, stage, live, writers, index, first[index], at)
            else:
                possible = node.pure and node.cheap and at >= first[index]
                possible = possible and all(may_repeat(source, at) for source in node.inputs)
            repeatable[index, at] = possible and not varying[index] and not node.collective
        return repeatable[index, at]

    def stages_that_read(index: int) -> set[int]:
        found: set[int] = set()
        for reader in readers[index]:
            if nodes[reader].collective:
                # Taken in by the loop before the collective's own stage, if there is anything to sum.
                found.add(stage[reader] - 1 if varying[index] else stage[reader] - 2 * nodes[reader].border)
            else:
                found |= {home[reader]} | copies.get(reader, set())
        return found

    # Readers first, so that what is copied for a copy is wanted in the copy's stages.
    for index in reversed(order):
        node = nodes[index]
        wanted = used_in[index] = stages_that_read(index)
        if node.argument:
            continue
        home[index] = stage[index]
        if index in copyable:
            if node.required:
                wanted = wanted | {first[index]}
            home[index] = min(wanted)
            copies[index] = wanted - {home[index]}
        elif not varying[index] and (node.reads is not None or node.cheap):
            again = {at for at in wanted if may_repeat(index, at)}
            if again == wanted and not node.required:
                home[index] = min(wanted)
            copies[index] = again - {home[index]}

    count = max([1, *(at + 1 for at in home.values())])
    members: list[list[int]] = [[] for _ in range(count)]
    copied: list[list[int]] = [[] for _ in range(count)]
    crossing: tuple[set[int], set[int]] = (set(), set())
    collectives: dict[int, list[int]] = {}
    for index in order:
        if nodes[index].argument:
            continue
        here = copies.get(index, set())
        if any(at != home[index] and at not in here for at in used_in[index]):
            crossing[varying[index]].add(index)
        if nodes[index].collective:
            if varying[nodes[index].inputs[0]]:
                collectives.setdefault(home[index] - 1, []).append(index)
            continue
        members[home[index]].append(index)
        for at in sorted(here):
            copied[at].append(index)
    shared, carries = crossing
    return Plan(
        stages=tuple(Stage(tuple(m), tuple(c)) for m, c in zip(members, copied, strict=True)),
        stage=home,
        carries=frozenset(carries),
        shared=frozenset(shared),
        collectives={at: tuple(found) for at, found in collectives.items()},
    )


def _may_read_again(
    nodes: Sequence[Node],
    stage: dict[int, int],
    live: Sequence[bool],
    writers: dict[Hashable, list[int]],
    read: int,
    earliest: int,
    at: int,
) -> bool:
    """Whether reading the resource in stage `at` gives what `read` gives."""
    node = nodes[read]
    if at < earliest or any(live[before] and nodes[before].effect for before in node.after):
        return False
    once = at % 2 == 0  # in a loop, the second turn would read what the first has written
    return all(
        stage[write] > at or (once and stage[write] == at and _ordered(nodes, read, write))
        for write in writers.get(node.reads, ())
    )


def _ordered(nodes: Sequence[Node], read: int, write: int) -> bool:
    """Whether ordering edges make `write` follow `read`, directly or through writes of the same resource."""
    seen = {write}
    stack = [write]
    while stack:
        for before in nodes[stack.pop()].after:
            if before == read:
                return True
            if before not in seen and nodes[before].writes & nodes[write].writes:
                seen.add(before)
                stack.append(before)
    return False
