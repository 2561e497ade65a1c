"""Exit policies that no training would give: fixed, random, adversarial. Exactness must not depend on them."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch

from TIDE import Candidates, ExitPolicy
from TIDE.prompt_exits.maps import PromptExit


class Everyone(ExitPolicy):
    """Every token leaves at every checkpoint it is asked at, with the identity prediction."""

    def __init__(self, *checkpoints: int) -> None:
        self.checkpoints = checkpoints

    def score(self, candidates: Candidates) -> torch.Tensor:
        return torch.ones(len(candidates.rows))


class Nobody(Everyone):
    """Every token is asked and none leaves."""

    def score(self, candidates: Candidates) -> torch.Tensor:
        return torch.zeros(len(candidates.rows))


class Where(Everyone):
    """Tokens leave where a rule over (depth, row, position) says so."""

    def __init__(self, rule: Callable[[int, int, int], bool], *checkpoints: int) -> None:
        super().__init__(*checkpoints)
        self.rule = rule

    def score(self, candidates: Candidates) -> torch.Tensor:
        asked = zip(candidates.rows, candidates.positions, strict=True)
        return torch.tensor([float(self.rule(candidates.depth, row, position)) for row, position in asked])


class ByState(Everyone):
    """Leaves by the sign of a coordinate of the state: the same for a token wherever it is computed."""

    def score(self, candidates: Candidates) -> torch.Tensor:
        return (candidates.states[:, 0] > 0).float()


class OddPlaces(PromptExit):
    """Tokens of a prompt stop at odd positions."""

    def __init__(self, depth: int) -> None:
        self.depth = depth

    def stops(self, states, positions):
        return torch.tensor([position % 2 == 1 for position in positions], dtype=torch.bool, device=states.device)


class Stopped(Nobody):
    """No exits but in the prompt."""

    def __init__(self, depth: int, *checkpoints: int) -> None:
        super().__init__(*checkpoints)
        self.prompt_exit = OddPlaces(depth)


class Knowing(Everyone):
    """Leaves at random and predicts from known texts, right or wrong at random: drafts of every length are
    accepted and rejected at every depth. Chance is a matter of row, position and depth, not of who is asked first."""

    def __init__(self, texts: list[list[int]], checkpoints: tuple[int, ...], seed: int, leaves: float, right: float) -> None:
        super().__init__(*checkpoints)
        self.texts, self.leaves, self.right = texts, leaves, right
        self.seed = seed
        self.vocabulary = 0  # not known yet

    def chances(self, candidates: Candidates, what: str) -> list[random.Random]:
        places = zip(candidates.rows, candidates.positions, strict=True)
        return [random.Random(f"{what} {self.seed} {candidates.depth} {row} {position}") for row, position in places]

    def score(self, candidates: Candidates) -> torch.Tensor:
        return torch.tensor([float(chance.random() < self.leaves) for chance in self.chances(candidates, "leaves")])

    def predict(self, candidates: Candidates, head) -> torch.Tensor:
        if not self.vocabulary:
            self.vocabulary = head(candidates.states[:1]).shape[-1]
        logits = candidates.states.new_zeros(len(candidates.rows), self.vocabulary)
        for index, chance in enumerate(self.chances(candidates, "right")):
            text, position = self.texts[candidates.rows[index]], candidates.positions[index]
            known = position + 1 < len(text) and chance.random() < self.right
            token = text[position + 1] if known else chance.randrange(logits.shape[1])
            logits[index, token] = 5.0
        return logits


def texts_of(output: torch.Tensor, mask: torch.Tensor) -> list[list[int]]:
    """Each row's own tokens, without its left padding."""
    return [row[int((keep == 0).sum()) :].tolist() for row, keep in zip(output, mask, strict=True)]
