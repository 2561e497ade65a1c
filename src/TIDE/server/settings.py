"""Settings of a server: what it is called, whom it lets in, and how much it takes on."""

from __future__ import annotations

from dataclasses import dataclass

from TIDE.config import MOST_ROWS


@dataclass(frozen=True)
class ServerSettings:
    """Choices of the operator of a server.

    Attributes:
        names: that clients may ask for as `model`; the first is in answers. Empty: the name of the model.
        api_keys: one of them must come with every request but those for the page and /health. Empty: none is needed.
        salted_keys: requests with different API keys share no K/V, so that none can tell by the time what another has asked.
        cors_origins: web pages of these origins may call; "*": all.
        max_model_len: tokens of a prompt and its answer; None: those the model was made for.
        max_rows: answers that are decoded at a time.
        max_queue: further answers that may wait; requests beyond get status 429.
        max_body: bytes of a request.
        request_seconds: after which a request ends with an error.
        drain_seconds: that requests have to end when the server is told to stop.
        vllm_metrics: /metrics has every family under vLLM's name too.
    """

    names: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = ()
    salted_keys: bool = False
    cors_origins: tuple[str, ...] = ()
    max_model_len: int | None = None
    max_rows: int = 32
    max_queue: int = 256
    max_body: int = 4 * 2**20
    request_seconds: float = 600.0
    drain_seconds: float = 30.0
    vllm_metrics: bool = False

    @property
    def most_answers(self) -> int:
        """Answers that there can be at a time, those included that wait."""
        return self.max_rows + self.max_queue

    def __post_init__(self) -> None:
        least = dict(max_rows=1, max_queue=0, max_body=1024, request_seconds=0.001, drain_seconds=0)
        for name, lowest in least.items():
            if getattr(self, name) < lowest:
                raise ValueError(f"{name} must be at least {lowest}, found {getattr(self, name)}.")
        if self.max_rows > MOST_ROWS:
            raise ValueError(
                f"max_rows must be at most {MOST_ROWS}, the answers that an engine decodes together, found {self.max_rows}. "
                f"Further answers wait: max_queue."
            )
        if self.max_model_len is not None and self.max_model_len < 2:
            raise ValueError(f"max_model_len must be at least 2, a prompt and an answer, found {self.max_model_len}.")
        if any(not key.strip() for key in self.api_keys):
            raise ValueError("an API key must not be empty. Leave it out to let everybody in.")
