"""A round whose drafts are a tree in every row: the parts of `run_round`, on slots.

draft       a level of the tree: the exit head is asked about all tokens of the beam at once, each sees its own ancestors
deep pass   the newest final token and the likeliest candidates, each in a column of its own
sample      the full model's token after each of them
accept      the path that it takes is moved to where a text would have it; from there on it is a round of drafts in a row
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from TIDE.engine.cache.slots import Slots, Tokens
from TIDE.engine.request.plan import Plan
from TIDE.engine.runners.device import DeviceRunner
from TIDE.engine.slots.drafter import SlotDrafter
from TIDE.engine.slots.sampler import Places, SlotSampler
from TIDE.kernels.reference.trees import TreeShape, tree_shape


def why_no_tree(plan: Plan, runner: DeviceRunner, drafter: SlotDrafter | None) -> str | None:
    """Return why drafts are in a row where the plan has a tree; None: they are not, or it has none."""
    if not plan.draft_tree or drafter is None:
        return None
    if not plan.weighs:
        return "exit_threshold chooses drafts by the scores of routers, and a tree by those of its head"
    if drafter.depth or drafter.head is None:
        return "its exit is no memory or EAGLE-3 head before the first layer, and others run layers for every node"
    return None if runner.has_compiled_layers else "the model's own modules do not know the ancestors of a token"


def shape_for(plan: Plan, choice: SlotSampler, rows: int) -> TreeShape | None:
    """Return the tree of each of `rows` rows; None: their drafts are in a row.

    Penalties count the tokens before a draft, and a row's own processors run on the host: a tree has several of these.
    """
    has_penalties = choice.features is not None and choice.features.penalties
    if rows not in plan.trees or choice.on_host or has_penalties:
        return None
    return tree_shape(plan.trees[rows], plan.max_pending)


class TreeRound:
    """The parts of a round.

    Args:
        most: columns that attention is planned for.
        accept: accepts drafts in a row.
    """

    def __init__(self, slots: Slots, shape: TreeShape, drafter: SlotDrafter, most: int, accept: Callable[[int], None]) -> None:
        self.runner = drafter.runner
        self.choice = drafter.choice
        self.drafter = drafter
        assert drafter.head is not None
        self.head = drafter.head
        self.slots = slots
        self.most = most
        self.tree = slots.drafts.tree(shape, self.runner.adapter.vocab_size)
        self._accept = accept

    def draft(self, step: int) -> bool:
        tree, drafter, slots = self.tree, self.drafter, self.slots
        guesses = tree.drafting.guesses[tree.drafting.of(step)]
        if not step:
            drafter.begin()
            tree.drafting.roots.view(slots.rows, -1).copy_(slots.grid.starts[0][:, None])
            tokens = slots.of(slice(0, 1))
            self.head.draft(slots, tokens, guesses, self.most, guesses)
        else:
            tokens = self._beam(step)
            self.head.draft(slots, tokens, guesses, self.most, guesses, tree.drafting.guesses)
        vocabulary = drafter.vocabulary
        logits = tree.logits_of(len(guesses), None if vocabulary is None else len(vocabulary))
        drafter.lm_head.write_logits(guesses, vocabulary, logits)
        self.head.to_memory(guesses)
        few = tree.drafting.few[0][: len(guesses)], tree.drafting.few[1][: len(guesses)]
        settings = None if self.choice.features is None else slots.choice.settings
        self.runner.exits.few_best(logits, vocabulary, settings, tokens.rows, tokens.positions, *few)
        self.runner.exits.grow(*few, slots.grid.starts[0], step, tree.drafting.beam, tree.candidates)
        return True

    def _beam(self, level: int) -> Tokens:
        """Return the tokens that are asked at a level; the memory before each is what its parent carries on."""
        own, beam = self.tree.drafting, self.tree.drafting.beam
        return Tokens(
            beam.ids[level], own.rows, beam.positions[level], beam.parents[level], own.numbers[own.of(level)],
            columns=beam.columns[level], ancestors=own.ancestors(level),
        )  # fmt: skip

    def deep_pass(self, drafted: int) -> None:
        tree, slots, own, nodes = self.tree, self.slots, self.tree.verifying, self.tree.verifying.nodes
        self.runner.exits.choose_nodes(tree.candidates, tree.shape, slots.chain.tokens[0], slots.grid.starts[0], nodes)
        ids, columns = nodes.ids.flatten(), nodes.columns.flatten()
        tokens = Tokens(ids, own.rows, nodes.positions.flatten(), ids, ids, columns=columns, ancestors=own.ancestors())
        self.runner.embed_on_slots(slots, tokens, own.states)
        self.drafter.through(range(self.runner.num_layers), own.states, tokens, self.most, own.captured)

    def sample(self, drafted: int) -> None:
        own, nodes = self.tree.verifying, self.tree.verifying.nodes
        places = Places(own.rows, nodes.positions.flatten(), nodes.parents.flatten())  # steps matter to penalties only
        self.choice.choose(own.states, places, own.chosen, own.best, logits=self.tree.logits_of(len(own.states)))

    def accept(self, drafted: int) -> None:
        tree, slots, store, memory = self.tree, self.slots, self.slots.store, self.slots.memory
        assert memory is not None
        found, best = (own.view(-1, slots.rows) for own in (tree.verifying.chosen, tree.verifying.best))
        self.runner.exits.straighten(tree.verifying.nodes, found, best, drafted, slots.chain, tree.path)
        layers = len(store.shapes)
        moved = store.keys[:layers], store.values[:layers], store.addresses
        self.runner.exits.move_columns(*moved, slots.tables, slots.grid.starts[0], tree.path)
        at = (tree.path * slots.rows + tree.rows).flatten()
        torch.index_select(tree.verifying.captured, 0, at, out=memory.captured[: len(at)])
        self.drafter.remember(drafted)
        self._accept(drafted)
